"""Dashboard of use, saturation and errors of generation instances."""

from deploy.grafana.board import (
    INSTANCE,
    INSTANCES,
    NAMESPACES,
    Board,
    Chart,
    Query,
    Section,
    gauge,
    mean,
    quantile,
    rate,
    ratio,
)

_G = "paceline_generation_"
_D = "paceline_drafts_"


def _each(expr: str, legend: str = "") -> Query:
    return Query(expr, f"{legend} {{{{instance}}}}".strip())


def _rate(name: str, by: str = "instance") -> str:
    return rate(name, by, INSTANCE)


_WORK = Section(
    "Work",
    (
        Chart("Tokens per second", "short", (_each(_rate(f"{_G}tokens_total")),)),
        Chart("Engine steps per second", "short", (_each(_rate(f"{_G}step_seconds_count")),)),
        Chart(
            "Engine step time, median",
            "s",
            (_each(quantile(0.5, f"{_G}step_seconds", "instance", INSTANCE)),),
        ),
        Chart(
            "Engine step time, p95", "s", (_each(quantile(0.95, f"{_G}step_seconds", "instance", INSTANCE)),)
        ),
        Chart(
            "Time in engine steps",
            "percentunit",
            (
                _each(_rate(f"{_G}step_seconds_sum"), "samples of the step"),
                Query(
                    rate(f"{_G}background_seconds_total", "instance", f'{INSTANCE},beside="nothing"'),
                    "pre-generation {{instance}}",
                ),
            ),
            "What is missing to 100 % is idle time.",
        ),
        Chart(
            "Tokens per engine step",
            "short",
            (_each(ratio(f"{_G}tokens_total", f"{_G}step_seconds_count", "instance", INSTANCE)),),
        ),
    ),
)

_ROOM = Section(
    "Room",
    (
        Chart(
            "Samples running",
            "short",
            (
                _each(gauge(f"{_G}running_samples", "instance", INSTANCE)),
                _each(gauge(f"{_G}max_running_samples", "instance", INSTANCE), "at most"),
            ),
        ),
        Chart("Samples waiting", "short", (_each(gauge(f"{_G}waiting_samples", "instance", INSTANCE)),)),
        Chart("KV in use", "percentunit", (_each(gauge(f"{_G}kv_usage_ratio", "instance", INSTANCE)),)),
        Chart("Processor cores in use", "short", (_each(_rate("process_cpu_seconds_total")),)),
        Chart(
            "Memory",
            "bytes",
            (_each(gauge("process_resident_memory_bytes", "instance", INSTANCE)),),
            "Resident memory of the process.",
        ),
    ),
)

_WEIGHTS = Section(
    "Weights",
    (
        Chart("Policy version", "none", (_each(gauge(f"{_G}policy_version", "instance", INSTANCE, "max")),)),
        Chart(
            "Time to stage and apply weights",
            "s",
            (Query(mean(f"{_G}weight_seconds", "phase, instance", INSTANCE), "{{phase}} {{instance}}"),),
        ),
    ),
)

_DRAFTS = Section(
    "Rollouts that drafts come from",
    (
        Chart(
            "Fetch from the draft store",
            "s",
            (
                Query(quantile(0.5, f"{_D}fetch_seconds", where=INSTANCE), "p50"),
                Query(quantile(0.95, f"{_D}fetch_seconds", where=INSTANCE), "p95"),
            ),
        ),
        Chart("Failed fetches per second", "short", (_each(_rate(f"{_D}fetch_failures_total")),)),
        Chart("Tokens fetched per second", "short", (_each(_rate(f"{_D}fetched_tokens_total")),)),
        Chart("Rollouts in memory", "bytes", (_each(gauge(f"{_D}cache_bytes", "instance", INSTANCE)),)),
        Chart(
            "Time in the suffix index",
            "percentunit",
            (Query(_rate(f"{_D}index_seconds_total", "phase, instance"), "{{phase}} {{instance}}"),),
            "Share of all time.",
        ),
    ),
)

INSTANCE_BOARD = Board(
    uid="paceline-instances",
    title="Paceline / Instances",
    meaning="What each generation instance does, and how near it is to what it can.",
    variables=(NAMESPACES, INSTANCES),
    sections=(_WORK, _ROOM, _WEIGHTS, _DRAFTS),
)
