"""Dashboard of speculative decoding: acceptance rate and length, draft length, block efficiency, reuse."""

from deploy.grafana.board import (
    INSTANCE,
    INSTANCES,
    NAMESPACES,
    RUNS,
    Board,
    Chart,
    Query,
    Section,
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
            "percentunit",
            (Query(_ratio(f"{_S}accepted_tokens_total", f"{_S}drafted_tokens_total"), "{{drafter}}"),),
            "Accepted over drafted tokens.",
        ),
        Chart(
            "Block efficiency",
            "short",
            (Query(f"1 + {_ratio(f'{_S}accepted_tokens_total', f'{_S}verify_steps_total')}", "{{drafter}}"),),
            "Accepted tokens and one more, for each verified draft.",
        ),
        Chart(
            "Draft length and acceptance length",
            "short",
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
            "percentunit",
            (
                Query(
                    f"{rate(f'{_S}accepted_tokens_total', 'drafter', INSTANCE)} / scalar({_EVERY})",
                    "{{drafter}}",
                ),
            ),
            "Accepted tokens over those of the steps. Falls when drafts are refused, and when there are none. "
            "Above 100 % while drafts shorten pre-generation too.",
            kind="area",
        ),
        Chart(
            "Acceptance by position",
            "percentunit",
            (
                Query(
                    _ratio(f"{_S}accepted_tokens_total", f"{_S}drafted_tokens_total", "position"),
                    "{{position}}",
                ),
            ),
            "Of the drafts that have a token at this position, those of which it was kept.",
            kind="bars",
        ),
        Chart(
            "Drafted tokens by position",
            "short",
            (Query(rate(f"{_S}drafted_tokens_total", "position", INSTANCE), "{{position}}"),),
            "Per second.",
            kind="bars",
        ),
        Chart(
            "Offers that broke the rules",
            "short",
            (Query(rate(f"{_S}drafter_faults_total", "drafter", INSTANCE), "{{drafter}}"),),
            "Per second; such a drafter has a defect.",
        ),
    ),
)

_PLANNER = Section(
    "Planner",
    (
        Chart(
            "Steps by decision",
            "short",
            (Query(rate(f"{_P}steps_total", "reason", INSTANCE), "{{reason}}"),),
            "Engine steps per second, and why they were drafted for or not.",
            kind="area",
        ),
        Chart(
            "Predicted gain",
            "short",
            (Query(gauge(f"{_P}predicted_speedup_ratio", "instance", INSTANCE, "max"), "{{instance}}"),),
            "Tokens a second over plain decoding, of the latest step.",
        ),
        Chart(
            "Planned tokens",
            "short",
            (
                Query(rate(f"{_P}tokens_total", where=INSTANCE), "planned"),
                Query(rate(f"{_P}expected_tokens_total", where=INSTANCE), "expected to be kept"),
                Query(rate(f"{_S}accepted_tokens_total", where=INSTANCE), "kept"),
            ),
            "Per second. Expected and kept differ where the estimates of acceptance are off.",
        ),
        Chart(
            "Predicted over measured step time",
            "short",
            (
                Query(
                    _ratio(
                        f"{_P}predicted_step_seconds_total", f"{_P}measured_step_seconds_total", "instance"
                    ),
                    "{{instance}}",
                ),
            ),
        ),
        Chart(
            "Error of predicted step times",
            "percentunit",
            (
                Query(quantile(0.5, f"{_P}step_time_error_ratio", where=INSTANCE), "p50"),
                Query(quantile(0.95, f"{_P}step_time_error_ratio", where=INSTANCE), "p95"),
            ),
        ),
    ),
)

_REUSE = Section(
    "Reuse of earlier rollouts",
    (
        Chart(
            "Reuse rate",
            "percentunit",
            (
                Query(
                    ratio(f"{_G}reused_prefix_tokens_total", f"{_G}whole_sample_tokens_total", "level"),
                    "{{level}}",
                ),
            ),
            "Response tokens before the first that is not the cached rollout's, over all response tokens.",
        ),
        Chart(
            "Samples reused in full",
            "percentunit",
            (
                Query(
                    ratio(f"{_G}fully_reused_samples_total", f"{_G}cached_samples_total", "level"),
                    "{{level}}",
                ),
            ),
            "Of the samples that had a cached rollout.",
        ),
        Chart(
            "Tokens taken over by the lenient rule",
            "short",
            (Query(rate("paceline_reuse_tokens_total", "instance", INSTANCE), "{{instance}}"),),
            "Per second.",
        ),
        Chart(
            "Tokens for each row verified",
            "short",
            (
                Query(
                    _ratio("paceline_reuse_tokens_total", "paceline_reuse_verified_rows_total", "instance"),
                    "{{instance}}",
                ),
            ),
            "Taken over by the lenient rule, for each row of logits that it took.",
        ),
        Chart(
            "Lenience",
            "none",
            (Query(gauge(f"{_G}lenience", "run", 'namespace=~"$namespace",run=~"$run"', "max"), "{{run}}"),),
            "The l of the run's last LENIENT batch.",
        ),
    ),
)

_LEARNER = Section(
    "Learner",
    (
        Chart(
            "Acceptance length of drafters",
            "short",
            (
                Query(gauge(f"{_D}acceptance_length", "drafter", how="max"), "{{drafter}}, held out"),
                Query(gauge(f"{_D}live_acceptance_length", how="max"), "live"),
            ),
            "Tokens a verification: of the candidate and the one in use on held-out samples, and on live traffic.",
        ),
        Chart(
            "Version and age",
            "s",
            (
                Query(f"time() - ({gauge(f'{_D}published_timestamp_seconds', how='max')} > 0)", "age"),
                Query(gauge(f"{_D}version", how="max"), "version"),
            ),
            "Of the published drafter.",
        ),
        Chart("KD loss", "short", (Query(gauge(f"{_D}kd_loss", how="max"), "nats per token"),)),
        Chart(
            "Training seconds per second",
            "short",
            (Query(rate(f"{_D}training_seconds_total", "hidden"), "hidden: {{hidden}}"),),
            "Hidden: something else was under way, generation or the trainer's work.",
        ),
        Chart(
            "Samples per minute",
            "short",
            (
                Query(f"60 * {rate(f'{_D}samples_used_total')}", "used"),
                Query(f"60 * {rate(f'{_D}dropped_samples_total', 'cause')}", "{{cause}}"),
            ),
            "Learned from, and not learned from by cause.",
        ),
        Chart(
            "Waiting",
            "short",
            (
                Query(gauge(f"{_D}backlog_entries", how="max"), "entries of the stream"),
                Query(gauge(f"{_D}waiting_samples", how="max"), "samples without reward"),
            ),
        ),
        Chart(
            "Candidates and roll-backs",
            "short",
            (
                Query(f"3600 * {rate(f'{_D}candidates_total', 'outcome')}", "{{outcome}}"),
                Query(f"3600 * {rate(f'{_D}rollbacks_total', 'cause')}", "rolled back: {{cause}}"),
            ),
            "Per hour.",
        ),
        Chart(
            "Instances",
            "short",
            (Query(gauge(f"{_D}instances", "state", how="max"), "{{state}}"),),
            "By whether they draft with what is published.",
        ),
    ),
)

SPECULATION = Board(
    uid="paceline-speculation",
    title="Paceline / Speculation",
    meaning="What is drafted and kept, what the planner expects, and what is taken over from earlier rollouts.",
    variables=(NAMESPACES, INSTANCES, RUNS),
    sections=(_ACCEPTANCE, _PLANNER, _REUSE, _LEARNER),
)
