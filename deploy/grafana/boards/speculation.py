"""Dashboard of speculative decoding: acceptance rate and length, draft length, block efficiency, reuse."""

from deploy.grafana.board import (
    INSTANCE,
    INSTANCES,
    NAMESPACES,
    NUMBER,
    PER_HOUR,
    PER_SECOND,
    RELEASES,
    RUN,
    RUNS,
    SECONDS,
    SHARE,
    TIMES,
    TOKENS,
    TOKENS_PER_SECOND,
    TOP,
    Board,
    Chart,
    Limits,
    Query,
    Section,
    each_instance,
    gauge,
    quantile,
    rate,
    ratio,
)

_S = "paceline_speculation_"
_P = "paceline_planner_"
_G = "paceline_gateway_"
_D = "paceline_drafter_"


def _ratio(part: str, whole: str, by: str = "drafter") -> str:
    return ratio(part, whole, by, INSTANCE)


_EVERY = f"({rate('paceline_generation_tokens_total', where=INSTANCE)} > 0)"

_ACCEPTANCE = Section(
    "Acceptance",
    (
        Chart(
            "Acceptance rate",
            SHARE,
            (Query(_ratio(f"{_S}accepted_tokens_total", f"{_S}drafted_tokens_total"), "{{drafter}}"),),
            "Accepted over drafted tokens.",
            most=1,
            runbook="PacelineAcceptanceCollapsed",
        ),
        Chart(
            "Block efficiency",
            TOKENS,
            (Query(f"1 + {_ratio(f'{_S}accepted_tokens_total', f'{_S}verify_steps_total')}", "{{drafter}}"),),
            "Accepted tokens and one more, for each verified draft.",
        ),
        Chart(
            "Draft length and accepted tokens",
            TOKENS,
            (
                Query(_ratio(f"{_S}drafted_tokens_total", f"{_S}verify_steps_total"), "{{drafter}} drafted"),
                Query(
                    _ratio(f"{_S}accepted_tokens_total", f"{_S}verify_steps_total"), "{{drafter}} accepted"
                ),
            ),
            "Tokens for each verified draft.",
        ),
        Chart(
            "Tokens out of drafts",
            SHARE,
            (
                Query(
                    f"{rate(f'{_S}accepted_tokens_total', 'drafter', INSTANCE)} / scalar({_EVERY})",
                    "{{drafter}}",
                ),
            ),
            "Accepted tokens over all tokens of the steps. Falls when drafts are refused, and when there are none. "
            "Above 100 % while drafts shorten pre-generation too.",
            kind="area",
            runbook="PacelineDraftsDriedUp",
        ),
        Chart(
            "Acceptance by position",
            SHARE,
            (
                Query(
                    _ratio(f"{_S}accepted_tokens_total", f"{_S}drafted_tokens_total", "position"),
                    "{{position}}",
                ),
            ),
            "Of the drafts with a token at this position, the share whose token was kept.",
            kind="bars",
            most=1,
        ),
        Chart(
            "Drafted tokens by position",
            TOKENS_PER_SECOND,
            (Query(rate(f"{_S}drafted_tokens_total", "position", INSTANCE), "{{position}}"),),
            "Where drafts are long, and where they are not tried.",
            kind="bars",
        ),
        Chart(
            "Invalid proposals",
            PER_SECOND,
            (Query(rate(f"{_S}drafter_faults_total", "drafter", INSTANCE), "{{drafter}}"),),
            "Such a drafter has a defect; its samples are right all the same.",
            limits=Limits(0.001, 1),
        ),
    ),
)

_PLANNER = Section(
    "Planner",
    (
        Chart(
            "Steps by decision",
            PER_SECOND,
            (Query(rate(f"{_P}steps_total", "reason", INSTANCE), "{{reason}}"),),
            "Engine steps, and why they were drafted for or not.",
            kind="area",
        ),
        Chart(
            "Predicted gain",
            TIMES,
            each_instance(gauge(f"{_P}predicted_speedup_ratio", "instance", INSTANCE, "max")),
            "Tokens a second over plain decoding, of the latest step.",
        ),
        Chart(
            "Planned tokens",
            TOKENS_PER_SECOND,
            (
                Query(rate(f"{_P}tokens_total", where=INSTANCE), "planned"),
                Query(rate(f"{_P}expected_tokens_total", where=INSTANCE), "expected to be kept"),
                Query(rate(f"{_S}accepted_tokens_total", where=INSTANCE), "kept"),
            ),
            "Expected and kept differ where the estimates of acceptance are off.",
        ),
        Chart(
            "Predicted over measured step time",
            TIMES,
            each_instance(
                _ratio(f"{_P}predicted_step_seconds_total", f"{_P}measured_step_seconds_total", "instance")
            ),
            "1: the planner knows how long steps take. Drafts are planned by it.",
        ),
        Chart(
            "Error of predicted step times",
            SHARE,
            (
                Query(quantile(0.5, f"{_P}step_time_error_ratio", where=INSTANCE), "p50"),
                Query(quantile(0.95, f"{_P}step_time_error_ratio", where=INSTANCE), "p95"),
            ),
            "Of single steps. High for minutes: others use the machine, or its clock changes.",
            limits=Limits(0.2, 0.5),
        ),
    ),
)

_REUSE = Section(
    "Reuse of earlier rollouts",
    (
        Chart(
            "Reuse rate",
            SHARE,
            (
                Query(
                    ratio(f"{_G}reused_prefix_tokens_total", f"{_G}whole_sample_tokens_total", "level"),
                    "{{level}}",
                ),
            ),
            "Response tokens before the first that is not the cached rollout's, over all response tokens.",
            most=1,
        ),
        Chart(
            "Samples reused in full",
            SHARE,
            (
                Query(
                    ratio(f"{_G}fully_reused_samples_total", f"{_G}cached_samples_total", "level"),
                    "{{level}}",
                ),
            ),
            "Of the samples that had a cached rollout.",
            most=1,
        ),
        Chart(
            "Tokens taken over by the lenient rule",
            TOKENS_PER_SECOND,
            each_instance(rate("paceline_reuse_tokens_total", "instance", INSTANCE)),
            "Tokens of cached rollouts that need not be generated.",
        ),
        Chart(
            "Tokens for each row verified",
            TOKENS,
            each_instance(
                _ratio("paceline_reuse_tokens_total", "paceline_reuse_verified_rows_total", "instance")
            ),
            "Taken over by the lenient rule, for each row of logits that it took.",
        ),
        Chart(
            "Lenience",
            NUMBER,
            (Query(gauge(f"{_G}lenience", "run", RUN, "max"), "{{run}}"),),
            "The l of the run's last LENIENT batch.",
        ),
    ),
)

_LEARNER = Section(
    "Learner",
    (
        Chart(
            "Acceptance length of drafters",
            TOKENS,
            (
                Query(gauge(f"{_D}acceptance_length", "drafter", how="max"), "{{drafter}}, held out"),
                Query(gauge(f"{_D}live_acceptance_length", how="max"), "live"),
            ),
            "Tokens a verification: of the candidate and the one in use on held-out samples, and on live traffic.",
        ),
        Chart(
            "Version and age",
            SECONDS,
            (
                Query(f"time() - ({gauge(f'{_D}published_timestamp_seconds', how='max')} > 0)", "age"),
                Query(gauge(f"{_D}version", how="max"), "version"),
            ),
            "Of the published drafter.",
        ),
        Chart(
            "KD loss",
            NUMBER,
            (Query(gauge(f"{_D}kd_loss", how="max"), "nats per token"),),
            "KL of the drafter from the policy, of the last update.",
        ),
        Chart(
            "Training seconds per second",
            SHARE,
            (Query(rate(f"{_D}training_seconds_total", "hidden"), "hidden: {{hidden}}"),),
            "Hidden: something else was under way, generation or the trainer's work.",
        ),
        Chart(
            "Samples per minute",
            NUMBER,
            (
                Query(f"60 * {rate(f'{_D}samples_used_total')}", "used"),
                Query(f"60 * {rate(f'{_D}dropped_samples_total', 'cause')}", "{{cause}}"),
            ),
            "Learned from, and not learned from by cause.",
        ),
        Chart(
            "Waiting",
            NUMBER,
            (
                Query(gauge(f"{_D}backlog_entries", how="max"), "entries of the stream"),
                Query(gauge(f"{_D}waiting_samples", how="max"), "samples without reward"),
            ),
            "What the learner has before it. A backlog that grows is dropped from its old end.",
            runbook="PacelineLearnerStuck",
        ),
        Chart(
            "Candidates and roll-backs",
            PER_HOUR,
            (
                Query(f"3600 * {rate(f'{_D}candidates_total', 'outcome')}", "{{outcome}}"),
                Query(f"3600 * {rate(f'{_D}rollbacks_total', 'cause')}", "rolled back: {{cause}}"),
            ),
            "What became of trained drafters, and drafters that were taken back.",
            runbook="PacelineDrafterRolledBack",
        ),
        Chart(
            "Instances",
            NUMBER,
            (Query(gauge(f"{_D}instances", "state", how="max"), "{{state}}"),),
            "By whether they draft with what is published.",
        ),
    ),
)

SPECULATION = Board(
    uid="paceline-speculation",
    title="Paceline / Speculation",
    meaning="What is drafted and kept, what the planner expects, and what is taken over from earlier rollouts.",
    variables=(NAMESPACES, RELEASES, INSTANCES, RUNS, TOP),
    sections=(_ACCEPTANCE, _PLANNER, _REUSE, _LEARNER),
)
