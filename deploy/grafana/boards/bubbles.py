"""Dashboard of bubbles, pre-generation, draft stores and migration."""

from deploy.grafana.board import (
    INSTANCE,
    INSTANCES,
    NAMESPACE,
    NAMESPACES,
    Board,
    Chart,
    Query,
    Section,
    gauge,
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
_HIT = f'{NAMESPACE},outcome="hit"'

_BUBBLES = Section(
    "Bubbles",
    (
        Chart(
            "Bubbles of the last step",
            "s",
            (
                Query(gauge(f"{_W}step_bubble_average_seconds", how="max"), "mean"),
                Query(gauge(f"{_W}step_bubble_max_seconds", how="max"), "longest"),
            ),
            "Time of an instance from its last sample of a step to the step's end.",
        ),
        Chart(
            "Bubbles", "s", (Query(mean(f"{_W}bubble_seconds"), "mean"), *quantiles(f"{_W}bubble_seconds"))
        ),
        Chart(
            "Coverage",
            "percentunit",
            (
                Query(ratio(f"{_W}pregenerated_tokens_total", f"{_W}announced_step_tokens_total"), "mean"),
                Query(gauge(f"{_W}step_coverage_ratio", how="max"), "last step"),
            ),
            "Tokens that there were of a step's samples when it began, over the tokens of that step.",
        ),
        Chart("Announced samples", "short", (Query(gauge(f"{_W}hinted_samples"), "announced"),)),
        Chart("Hints", "short", (Query(rate(f"{_W}hints_total", "outcome"), "{{outcome}}"),), "Per second."),
    ),
)

_AHEAD = Section(
    "Pre-generation",
    (
        Chart(
            "Tokens per second",
            "short",
            (Query(rate(f"{_G}pregenerated_tokens_total", "instance", INSTANCE), "{{instance}}"),),
        ),
        Chart(
            "Samples in the background",
            "short",
            (Query(gauge(f"{_G}background_samples", "instance", INSTANCE), "{{instance}}"),),
        ),
        Chart(
            "Ended samples",
            "short",
            (Query(rate(f"{_G}pregenerated_samples_total", "outcome", INSTANCE), "{{outcome}}"),),
            "Per second: finished; partial, so with tokens; empty.",
        ),
        Chart(
            "Time to make way",
            "s",
            (
                Query(quantile(0.95, f"{_G}yield_seconds", where=INSTANCE), "for a sample of the step, p95"),
                Query(
                    quantile(0.95, f"{_G}halt_delay_seconds", where=INSTANCE), "at the end of the step, p95"
                ),
                Query(quantile(0.95, f"{_G}update_halt_seconds", where=INSTANCE), "for new weights, p95"),
            ),
        ),
        Chart(
            "Leased and open samples",
            "short",
            (Query(gauge(f"{_B}leased_tasks"), "leased"), Query(gauge(f"{_B}open_tasks"), "open")),
        ),
        Chart(
            "Leases",
            "short",
            (Query(rate(f"{_B}leases_total", "event"), "{{event}}"),),
            "Per second, by event.",
        ),
        Chart(
            "Polls of the coordinator",
            "short",
            (Query(rate(f"{_G}bubble_polls_total", "outcome", INSTANCE), "{{outcome}}"),),
            "Per second.",
        ),
    ),
)

_STORE = Section(
    "Draft store",
    (
        Chart(
            "Memory",
            "bytes",
            (
                Query(gauge(f"{_D}bytes", "instance"), "{{instance}}"),
                Query(gauge(f"{_D}budget_bytes", "instance"), "at most {{instance}}"),
            ),
        ),
        Chart("Rollouts", "short", (Query(gauge(f"{_D}rollouts", "kind"), "{{kind}}"),), kind="area"),
        Chart(
            "Prompts found",
            "percentunit",
            (
                Query(
                    f"{rate(f'{_D}prompts_fetched_total', where=_HIT)}"
                    f" / ({rate(f'{_D}prompts_fetched_total')} > 0)",
                    "hits",
                ),
            ),
            "Of the prompts that instances ask for, those that there are rollouts of.",
        ),
        Chart(
            "Rollouts put",
            "short",
            (Query(rate(f"{_D}puts_total", "outcome"), "{{outcome}}"),),
            "Per second.",
        ),
        Chart(
            "Rollouts removed",
            "short",
            (Query(rate(f"{_D}removals_total", "cause"), "{{cause}}"),),
            "Per second. `cold` is what might still have been of use.",
        ),
    ),
)

_MOVES = Section(
    "Samples that move",
    (
        Chart(
            "Moves",
            "short",
            (Query(rate(f"{_M}moves_total", "outcome, reason", INSTANCE), "{{outcome}} {{reason}}"),),
            "Samples per second that instances moved to others: with their KV (moved) or by their prefix "
            "(handed_on), or tried to.",
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
            "s",
            (
                Query(quantile(0.95, f"{_M}stage_seconds", "stage", INSTANCE), "{{stage}}"),
                Query(quantile(0.95, f"{_M}resume_seconds", where=INSTANCE), "resume"),
            ),
            "stall is the time for which a sample is paused.",
        ),
        Chart(
            "Stall in engine steps",
            "short",
            (
                Query(mean(f"{_M}stall_steps", where=INSTANCE), "mean"),
                *quantiles(f"{_M}stall_steps", where=INSTANCE),
            ),
        ),
        Chart(
            "What the gateway makes of moved samples",
            "short",
            (Query(rate(f"{_W}moves_total", "outcome"), "{{outcome}}"),),
            "Per second. Those that are neither claimed nor by_prefix are resumed by their prefix anywhere.",
        ),
        Chart(
            "Arrivals",
            "short",
            (Query(rate(f"{_M}arrivals_total", "state", INSTANCE), "{{state}}"),),
            "Per second, by how far they got.",
        ),
        Chart(
            "Decisions of the reallocator",
            "short",
            (Query(rate(f"{_R}decisions_total", "outcome"), "{{outcome}}"),),
            "Per second.",
        ),
        Chart(
            "Samples and saturation points",
            "short",
            (
                Query(gauge(f"{_R}instance_samples", "instance_id", how="max"), "{{instance_id}}"),
                Query(
                    gauge(f"{_R}saturation_point_samples", "instance_id", how="max"),
                    "saturation point {{instance_id}}",
                ),
            ),
            "Beyond its saturation point an instance gains little from more samples; below it, it could take more.",
        ),
        Chart(
            "Gain of moves",
            "percentunit",
            (
                Query(quantile(0.5, f"{_R}predicted_gain"), "predicted"),
                Query(quantile(0.5, f"{_R}achieved_gain"), "measured"),
            ),
            "Medians. There is no mean: a histogram of values that can be negative has no sum.",
        ),
        Chart(
            "Trust in predicted gains",
            "percentunit",
            (Query(gauge(f"{_R}trust", "rule", how="max"), "{{rule}}"),),
            "Share of its predicted gain that a rule has achieved. With little trust fewer moves are made.",
        ),
        Chart(
            "Engine time that a move costs",
            "s",
            (Query(gauge(f"{_R}move_cost_seconds", "by, side", how="max"), "by {{by}}, {{side}}"),),
            "As the reallocator has learned it. By prefix the receiver also prefills the context.",
        ),
        Chart(
            "Resumed by their prefix",
            "short",
            (Query(rate(f"{_W}resubmissions_total", "cause"), "{{cause}}"),),
            "Samples per second whose KV is computed anew on another instance.",
        ),
    ),
)

BUBBLES = Board(
    uid="paceline-bubbles",
    title="Paceline / Bubbles and migrations",
    meaning="Idle time within steps, what is generated ahead in it, where that is kept, and samples that move.",
    variables=(NAMESPACES, INSTANCES),
    sections=(_BUBBLES, _AHEAD, _STORE, _MOVES),
)
