"""Dashboard of bubbles, pre-generation, draft stores and migration."""

from deploy.grafana.board import (
    BYTES,
    INSTANCE,
    INSTANCES,
    NAMESPACES,
    PER_SECOND,
    PLATFORM,
    RELEASES,
    SAMPLES,
    SECONDS,
    SHARE,
    TOKENS_PER_SECOND,
    TOP,
    Board,
    Chart,
    Query,
    Section,
    each_instance,
    gauge,
    heat,
    largest,
    mean,
    quantile,
    quantiles,
    rate,
    ratio,
)

_W = "paceline_gateway_"
_G = "paceline_generation_"
_B = "paceline_bubbles_"
_D = "paceline_drafts_"
_M = "paceline_migration_"
_R = "paceline_reallocator_"
_HIT = f'{PLATFORM},outcome="hit"'

_BUBBLES = Section(
    "Bubbles",
    (
        Chart(
            "Bubbles of the last step",
            SECONDS,
            (
                Query(gauge(f"{_W}step_bubble_average_seconds", how="max"), "mean"),
                Query(gauge(f"{_W}step_bubble_max_seconds", how="max"), "longest"),
            ),
            "Time of an instance from its last sample of a step to the step's end.",
        ),
        Chart(
            "Bubbles",
            SECONDS,
            heat(f"{_W}bubble_seconds"),
            "Times from an instance's last sample of a step to the step's end, which pre-generation fills.",
            kind="heatmap",
        ),
        Chart(
            "Coverage",
            SHARE,
            (
                Query(ratio(f"{_W}pregenerated_tokens_total", f"{_W}announced_step_tokens_total"), "mean"),
                Query(gauge(f"{_W}step_coverage_ratio", how="max"), "last step"),
            ),
            "Tokens that there were of a step's samples when it began, over the tokens of that step.",
        ),
        Chart(
            "Announced samples",
            SAMPLES,
            (Query(gauge(f"{_W}hinted_samples"), "announced"),),
            "Samples of coming steps that trainers have named. None: nothing can be generated ahead.",
        ),
        Chart(
            "Hints",
            PER_SECOND,
            (Query(rate(f"{_W}hints_total", "outcome"), "{{outcome}}"),),
            "By outcome; late and far ahead are of no use.",
        ),
        Chart(
            "Unannounced steps",
            PER_SECOND,
            (Query(rate(f"{_W}unannounced_steps_total"), "steps"),),
            "Steps that were not announced, so nothing was generated ahead. They include the first step of a run.",
        ),
    ),
)

_AHEAD = Section(
    "Pre-generation",
    (
        Chart(
            "Tokens per second",
            TOKENS_PER_SECOND,
            each_instance(rate(f"{_G}pregenerated_tokens_total", "instance", INSTANCE)),
            "Tokens of coming steps.",
        ),
        Chart(
            "Samples in the background",
            SAMPLES,
            each_instance(gauge(f"{_G}background_samples", "instance", INSTANCE)),
            "Samples of coming steps that instances generate now.",
        ),
        Chart(
            "Ended samples",
            PER_SECOND,
            (Query(rate(f"{_G}pregenerated_samples_total", "outcome", INSTANCE), "{{outcome}}"),),
            "finished; partial, so with tokens; empty.",
        ),
        Chart(
            "Time to make way",
            SECONDS,
            (
                Query(quantile(0.95, f"{_G}yield_seconds", where=INSTANCE), "for a sample of the step, p95"),
                Query(
                    quantile(0.95, f"{_G}halt_delay_seconds", where=INSTANCE), "at the end of the step, p95"
                ),
                Query(quantile(0.95, f"{_G}update_halt_seconds", where=INSTANCE), "for new weights, p95"),
            ),
            "How soon pre-generation ends when something else wants the instance.",
        ),
        Chart(
            "Leased and open samples",
            SAMPLES,
            (Query(gauge(f"{_B}leased_tasks"), "leased"), Query(gauge(f"{_B}open_tasks"), "open")),
            "Samples of coming steps that instances have leased, and that are not finished.",
        ),
        Chart(
            "Leases",
            PER_SECOND,
            (Query(rate(f"{_B}leases_total", "event"), "{{event}}"),),
            "By event. expired: an instance fell silent; replaced: a newer hint has other samples.",
        ),
        Chart(
            "Polls of the coordinator",
            PER_SECOND,
            (Query(rate(f"{_G}bubble_polls_total", "outcome", INSTANCE), "{{outcome}}"),),
            "Idle instances ask for work. failed: the coordinator does not answer, and nothing is generated ahead.",
        ),
    ),
)

_STORE = Section(
    "Draft store",
    (
        Chart(
            "Memory",
            BYTES,
            (
                Query(gauge(f"{_D}bytes", "instance"), "{{instance}}"),
                Query(gauge(f"{_D}budget_bytes", "instance"), "at most {{instance}}"),
            ),
            "Of the draft stores. At the limit the least useful rollouts go.",
            runbook="PacelineDraftStoreOverBudget",
        ),
        Chart(
            "Rollouts",
            "si: rollouts",
            (Query(gauge(f"{_D}rollouts", "kind"), "{{kind}}"),),
            "Rollouts kept, by what they are.",
            kind="area",
        ),
        Chart(
            "Prompts found",
            SHARE,
            (
                Query(
                    f"{rate(f'{_D}prompts_fetched_total', where=_HIT)}"
                    f" / ({rate(f'{_D}prompts_fetched_total')} > 0)",
                    "hits",
                ),
            ),
            "Share of the prompts that instances ask for of which rollouts are stored.",
            most=1,
        ),
        Chart(
            "Rollouts put",
            PER_SECOND,
            (Query(rate(f"{_D}puts_total", "outcome"), "{{outcome}}"),),
            "Rollouts that gateways and instances send.",
        ),
        Chart(
            "Rollouts removed",
            PER_SECOND,
            (Query(rate(f"{_D}removals_total", "cause"), "{{cause}}"),),
            "`cold` is what might still have been of use.",
        ),
    ),
)

_MOVES = Section(
    "Samples that move",
    (
        Chart(
            "Moves",
            PER_SECOND,
            (Query(rate(f"{_M}moves_total", "outcome, reason", INSTANCE), "{{outcome}} {{reason}}"),),
            "Samples that instances moved to others: with their KV (moved) or by their prefix "
            "(handed_on), or tried to.",
            runbook="PacelineMigrationsFailing",
        ),
        Chart(
            "KV sent",
            "Bps",
            (Query(rate(f"{_M}bytes_total", "stage", INSTANCE), "{{stage}}"),),
            "copy: while the sample decodes on. delta: what was generated meanwhile, while it is paused.",
            kind="area",
        ),
        Chart(
            "Time of a move, p95",
            SECONDS,
            (
                Query(quantile(0.95, f"{_M}stage_seconds", "stage", INSTANCE), "{{stage}}"),
                Query(quantile(0.95, f"{_M}resume_seconds", where=INSTANCE), "resume"),
            ),
            "stall is the time for which a sample is paused.",
        ),
        Chart(
            "Stall in engine steps",
            "si: steps",
            (
                Query(mean(f"{_M}stall_steps", where=INSTANCE), "mean"),
                *quantiles(f"{_M}stall_steps", where=INSTANCE),
            ),
            "Engine steps of the donor for which a moved sample is paused.",
        ),
        Chart(
            "Moved samples by what the gateway did",
            PER_SECOND,
            (Query(rate(f"{_W}moves_total", "outcome"), "{{outcome}}"),),
            "Those that are neither claimed nor by_prefix are resumed by their prefix anywhere.",
        ),
        Chart(
            "Arrivals",
            PER_SECOND,
            (Query(rate(f"{_M}arrivals_total", "state", INSTANCE), "{{state}}"),),
            "Samples that come to an instance, by how far they got.",
        ),
        Chart(
            "Decisions of the reallocator",
            PER_SECOND,
            (Query(rate(f"{_R}decisions_total", "outcome"), "{{outcome}}"),),
            "late: instances took too long to answer.",
        ),
        Chart(
            "Samples and saturation points",
            SAMPLES,
            (
                *largest(gauge(f"{_R}instance_samples", "instance_id", how="max"), "{{instance_id}}"),
                Query(
                    f"quantile(0.5, {gauge(f'{_R}saturation_point_samples', 'instance_id', how='max')})",
                    "saturation point, median of all",
                ),
            ),
            "Beyond its saturation point an instance gains little from more samples; below it, it could take more.",
        ),
        Chart(
            "Gain of moves",
            SHARE,
            (
                Query(quantile(0.5, f"{_R}predicted_gain"), "predicted"),
                Query(quantile(0.5, f"{_R}achieved_gain"), "measured"),
            ),
            "Medians. There is no mean: a histogram of values that can be negative has no sum.",
        ),
        Chart(
            "Trust in predicted gains",
            SHARE,
            (Query(gauge(f"{_R}trust", "rule", how="max"), "{{rule}}"),),
            "Share of its predicted gain that a rule has achieved. With little trust fewer moves are made.",
        ),
        Chart(
            "Engine time that a move costs",
            SECONDS,
            (Query(gauge(f"{_R}move_cost_seconds", "by, side", how="max"), "by {{by}}, {{side}}"),),
            "As the reallocator has learned it. By prefix the receiver also prefills the context.",
        ),
        Chart(
            "Resumed by their prefix",
            PER_SECOND,
            (Query(rate(f"{_W}resubmissions_total", "cause"), "{{cause}}"),),
            "Samples whose KV is computed anew on another instance.",
        ),
    ),
)

BUBBLES = Board(
    uid="paceline-bubbles",
    title="Paceline / Bubbles and migrations",
    meaning="Idle time within steps, what is generated ahead in it, where that is kept, and samples that move.",
    variables=(NAMESPACES, RELEASES, INSTANCES, TOP),
    sections=(_BUBBLES, _AHEAD, _STORE, _MOVES),
)
