"""Dashboard of steps and of the RPCs behind them."""

from deploy.grafana.board import (
    NAMESPACES,
    RUNS,
    Board,
    Chart,
    Query,
    Section,
    gauge,
    mean,
    quantile,
    quantiles,
    rate,
    share,
)

_G = "paceline_gateway_"
_P = "paceline_policy_"
_S = "paceline_scaling_"
_RUN = 'namespace=~"$namespace",run=~"$run"'
_FAILED = 'namespace=~"$namespace",code=~"INTERNAL|UNKNOWN|DATA_LOSS|UNAVAILABLE|DEADLINE_EXCEEDED"'


def _number(title: str, unit: str, expr: str, meaning: str = "") -> Chart:
    return Chart(title, unit, (Query(expr),), meaning, kind="stat")


def _of_run(title: str, unit: str, name: str, meaning: str = "") -> Chart:
    return Chart(title, unit, (Query(gauge(_G + name, "run", _RUN, "max"), "{{run}}"),), meaning)


_NOW = Section(
    "Now",
    (
        _number("Serving", "short", gauge(f"{_G}instances", where='namespace=~"$namespace",state="serving"')),
        _number("Policy version", "none", gauge(f"{_G}policy_version", how="max")),
        _number("Running", "short", gauge(f"{_G}running_samples"), "Samples on instances."),
        _number("Queued", "short", gauge(f"{_G}queued_samples"), "Samples that wait for an instance."),
        _number("Tokens", "short", rate(f"{_G}tokens_total"), "Response tokens per second."),
        _number(
            "Oldest batch",
            "s",
            f'max(time() - ({_G}oldest_batch_timestamp_seconds{{namespace=~"$namespace"}} > 0)) or vector(0)',
            "Since the oldest unfinished batch was accepted.",
        ),
    ),
)

_STEPS = Section(
    "Steps",
    (
        Chart("Step time", "s", (Query(mean(f"{_G}step_seconds"), "mean"), *quantiles(f"{_G}step_seconds"))),
        Chart(
            "Tokens per second",
            "short",
            (Query(rate(f"{_G}tokens_total", "instance_id"), "{{instance_id}}"),),
        ),
        Chart("Samples per second", "short", (Query(rate(f"{_G}samples_total", "status"), "{{status}}"),)),
        Chart(
            "Samples on instances",
            "short",
            (
                Query(gauge(f"{_G}running_samples", "instance_id"), "{{instance_id}}"),
                Query(gauge(f"{_G}queued_samples"), "queued"),
            ),
            "Where the lines fall to nothing one after the other, instances wait for the last of them: a bubble.",
            kind="area",
        ),
        Chart("Wait for an instance", "s", quantiles(f"{_G}queue_seconds")),
        Chart("Response length", "short", quantiles(f"{_G}sample_tokens"), "In tokens."),
        Chart(
            "Bubble",
            "percentunit",
            (
                Query(
                    'max by (namespace) (namespace:paceline_bubble:ratio_rate30m{namespace=~"$namespace"})',
                    "share",
                ),
            ),
            "Of the time that instances had for the steps, the share in which they had no sample of them.",
        ),
        Chart(
            "Samples resumed elsewhere",
            "short",
            (Query(rate(f"{_G}resubmissions_total", "cause"), "{{cause}}"),),
        ),
    ),
)

_RUNS = Section(
    "Runs",
    (
        _of_run("Step", "none", "step"),
        _of_run("Mean reward", "none", "reward", "As the trainer reports it."),
        _of_run(
            "KL",
            "none",
            "reported_kl",
            "Between the policy and the one that sampled, as the trainer reports it.",
        ),
        _of_run("Clip fraction", "percentunit", "reported_clip_fraction", "As the trainer reports it."),
    ),
)

_CALLS = Section(
    "Calls",
    (
        Chart(
            "Calls per second", "short", (Query(rate("paceline_rpc_requests_total", "method"), "{{method}}"),)
        ),
        Chart(
            "Calls that ended badly, per second",
            "short",
            (
                Query(
                    rate(
                        "paceline_rpc_requests_total",
                        "method, code",
                        'namespace=~"$namespace",code!~"OK|CANCELLED"',
                    ),
                    "{{method}} {{code}}",
                ),
            ),
        ),
        Chart(
            "Failures",
            "percentunit",
            (
                Query(
                    share("paceline_rpc_requests_total", "paceline_rpc_requests_total", "method", of=_FAILED),
                    "{{method}}",
                ),
            ),
            "Share of calls that failed through no fault of the caller.",
        ),
        Chart(
            "Duration, median", "s", (Query(quantile(0.5, "paceline_rpc_seconds", "method"), "{{method}}"),)
        ),
        Chart("Duration, p99", "s", (Query(quantile(0.99, "paceline_rpc_seconds", "method"), "{{method}}"),)),
        Chart("Calls running", "short", (Query(gauge("paceline_rpc_in_flight", "method"), "{{method}}"),)),
    ),
)

_STATE = Section(
    "State",
    (
        Chart("Instances", "short", (Query(gauge(f"{_G}instances", "state"), "{{state}}"),), kind="area"),
        Chart("Journal round trip", "s", quantiles(f"{_G}journal_seconds")),
        Chart("Journal errors per second", "short", (Query(rate(f"{_G}journal_errors_total"), "errors"),)),
        Chart(
            "Weight updates",
            "s",
            (Query(mean(f"{_G}update_seconds", "phase"), "{{phase}}"),),
            "Mean time of their phases, over all instances.",
        ),
        Chart(
            "Weight updates per second",
            "short",
            (Query(rate(f"{_G}updates_total", "outcome"), "{{outcome}}"),),
        ),
        Chart(
            "Redis",
            "short",
            (Query(gauge("paceline_redis_up", "instance", how="min"), "{{instance}}"),),
            "1 where it can be reached.",
        ),
        Chart(
            "Rollouts into the draft store",
            "short",
            (Query(rate(f"{_G}history_rollouts_total", "outcome"), "{{outcome}}"),),
            "Finished samples per second.",
        ),
        Chart(
            "Refusals",
            "percentunit",
            (Query(share(f"{_G}refusals_total", f"{_G}placements_total", "instance_id"), "{{instance_id}}"),),
            "Share of samples that an instance would not take when they were given to it.",
        ),
    ),
)

_POLICY = Section(
    "Policy",
    (
        Chart(
            "Decisions",
            "short",
            (Query(rate(f"{_P}decisions_total", "kind"), "{{kind}}"),),
            "Per second; `paceline policy watch` shows each one and why.",
        ),
        Chart(
            "Instances that work by the latest knobs",
            "short",
            (Query(gauge(f"{_P}instances", "state"), "{{state}}"),),
            kind="area",
        ),
        Chart(
            "Cap on draft lengths",
            "none",
            (Query(gauge(f"{_P}draft_cap", "run", _RUN, "max"), "{{run}}"),),
            "That a run's ladder has reached.",
        ),
        Chart(
            "Instances",
            "short",
            (
                Query(gauge(f"{_S}recommended_replicas", "pool", how="max"), "recommended {{pool}}"),
                Query(gauge(f"{_S}wanted_replicas", "pool", how="max"), "wanted {{pool}}"),
                Query(gauge(f"{_S}replicas", "pool", how="max"), "asked of Kubernetes {{pool}}"),
            ),
            "Recommended: by what there is to do. Wanted: what patience lets through of it.",
        ),
    ),
)

OVERVIEW = Board(
    uid="paceline-overview",
    title="Paceline / Steps",
    meaning="How the steps of rollouts go, what the trainer says of them, and the calls behind them.",
    variables=(NAMESPACES, RUNS),
    sections=(_NOW, _STEPS, _RUNS, _CALLS, _STATE, _POLICY),
)
