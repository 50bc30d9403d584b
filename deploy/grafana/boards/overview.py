"""Dashboard of the platform's health, of steps, and of the RPCs behind them."""

from deploy.grafana.board import (
    BYTES,
    NAMESPACES,
    NUMBER,
    PER_SECOND,
    PLATFORM,
    RELEASES,
    RUN,
    RUNS,
    SAMPLES,
    SECONDS,
    SHARE,
    TOKENS,
    TOKENS_PER_SECOND,
    TOP,
    Board,
    Chart,
    Limits,
    Query,
    Section,
    gauge,
    heat,
    largest,
    mean,
    quantile,
    quantiles,
    rate,
    share,
)

_G = "paceline_gateway_"
_P = "paceline_policy_"
_S = "paceline_scaling_"
_FAILED = f'{PLATFORM},code=~"INTERNAL|UNKNOWN|DATA_LOSS|UNAVAILABLE|DEADLINE_EXCEEDED"'
_ALERTS = 'alertname=~"Paceline.*",alertstate="firing",namespace=~"$namespace"'
_REDIS = 'namespace=~"$namespace"'
"""Selects redis_exporter, which need not be of the release."""


def _number(
    title: str, unit: str, expr: str, meaning: str, limits: Limits | None = None, runbook: str = ""
) -> Chart:
    return Chart(title, unit, (Query(expr),), meaning, kind="stat", limits=limits, runbook=runbook)


def _of_run(title: str, unit: str, name: str, meaning: str, most: float | None = None) -> Chart:
    return Chart(title, unit, (Query(gauge(_G + name, "run", RUN, "max"), "{{run}}"),), meaning, most=most)


_WELL = Section(
    "Is all well?",
    (
        _number(
            "Critical alerts",
            NUMBER,
            f'count(ALERTS{{{_ALERTS},severity="critical"}}) or vector(0)',
            "Alerts that fire now. Each has a section in the runbook.",
            Limits(1, 1),
        ),
        _number(
            "Warnings",
            NUMBER,
            f'count(ALERTS{{{_ALERTS},severity="warning"}}) or vector(0)',
            "Alerts that fire now and can wait for the day.",
            Limits(1, 10),
        ),
        _number(
            "Leading gateways",
            NUMBER,
            f"{gauge(f'{_G}leader')} or vector(0)",
            "One. None: trainers are answered UNAVAILABLE.",
            Limits(1, 1, below=True),
            runbook="PacelineNoLeader",
        ),
        _number(
            "Instances lost",
            NUMBER,
            f"count({_G}instance_up{{{PLATFORM}}} == 0) or vector(0)",
            "Instances that died without leaving. Their samples go on elsewhere.",
            Limits(1, 2),
            runbook="PacelineInstanceDown",
        ),
        _number(
            "Services that reach Redis",
            SHARE,
            f"avg(paceline_redis_up{{{PLATFORM}}})",
            "Nothing is acknowledged or delivered by a gateway that does not.",
            Limits(1, 1, below=True),
            runbook="PacelineRedisUnreachable",
        ),
        _number(
            "Failed samples, last hour",
            SAMPLES,
            f'sum(increase({_G}samples_total{{{PLATFORM},status="failed"}}[1h])) or vector(0)',
            "Samples that were given up after repeated attempts, or for an error.",
            Limits(1, 100),
            runbook="PacelineSamplesFailing",
        ),
        Chart(
            "Alerts",
            NUMBER,
            (Query(f"max by (severity, alertname, instance, instance_id, method) (ALERTS{{{_ALERTS}}})"),),
            "What fires now. docs/runbook.md has a section of each name.",
            kind="table",
        ),
    ),
)

_NOW = Section(
    "Now",
    (
        _number(
            "Serving",
            NUMBER,
            gauge(f"{_G}instances", where=f'{PLATFORM},state="serving"'),
            "Instances that take samples.",
        ),
        _number("Policy version", NUMBER, gauge(f"{_G}policy_version", how="max"), "The published one."),
        _number("Running", SAMPLES, gauge(f"{_G}running_samples"), "Samples on instances."),
        _number("Queued", SAMPLES, gauge(f"{_G}queued_samples"), "Samples that wait for an instance."),
        _number("Tokens", TOKENS_PER_SECOND, rate(f"{_G}tokens_total"), "Response tokens of all instances."),
        _number(
            "Oldest batch",
            SECONDS,
            f"max(time() - ({_G}oldest_batch_timestamp_seconds{{{PLATFORM}}} > 0)) or vector(0)",
            "Since the oldest unfinished batch was accepted.",
            runbook="PacelineStepOverdue",
        ),
    ),
)

_STEPS = Section(
    "Steps",
    (
        Chart(
            "Step time",
            SECONDS,
            (Query(mean(f"{_G}step_seconds"), "mean"), *quantiles(f"{_G}step_seconds")),
            "From the acceptance of a step's first sample to the end of its last.",
        ),
        Chart(
            "Tokens per second",
            TOKENS_PER_SECOND,
            largest(rate(f"{_G}tokens_total", "instance_id"), "{{instance_id}}"),
            "Response tokens as instances report them.",
        ),
        Chart(
            "Samples ended",
            PER_SECOND,
            (Query(rate(f"{_G}samples_total", "status"), "{{status}}"),),
            "Samples per second by how they ended. failed and aborted want an explanation.",
        ),
        Chart(
            "Samples on instances",
            SAMPLES,
            (
                Query(f"topk($top, {gauge(f'{_G}running_samples', 'instance_id')})", "{{instance_id}}"),
                Query(gauge(f"{_G}queued_samples"), "queued"),
            ),
            "Where the lines fall to nothing one after the other, instances wait for the last of them: a bubble.",
            kind="area",
        ),
        Chart(
            "Wait for an instance",
            SECONDS,
            heat(f"{_G}queue_seconds"),
            "Samples per second by their time from acceptance to placement.",
            kind="heatmap",
        ),
        Chart(
            "Response length",
            TOKENS,
            heat(f"{_G}sample_tokens"),
            "Samples per second by their length. The long tail at the top decides the step time.",
            kind="heatmap",
        ),
        Chart(
            "Bubble",
            SHARE,
            (
                Query(
                    'max by (namespace) (namespace:paceline_bubble:ratio_rate30m{namespace=~"$namespace"})',
                    "share",
                ),
            ),
            "Of the time that instances had for the steps, the share in which they had no sample of them.",
            most=1,
        ),
        Chart(
            "Samples resumed elsewhere",
            PER_SECOND,
            (Query(rate(f"{_G}resubmissions_total", "cause"), "{{cause}}"),),
            "Samples per second that go on from their prefix on another instance.",
        ),
    ),
)

_RUNS = Section(
    "Runs",
    (
        _of_run("Step", NUMBER, "step", "The step of a run that was begun last."),
        _of_run("Mean reward", NUMBER, "reward", "As the trainer reports it."),
        _of_run(
            "KL",
            NUMBER,
            "reported_kl",
            "Between the policy and the one that sampled, as the trainer reports it.",
        ),
        _of_run(
            "Clip fraction",
            SHARE,
            "reported_clip_fraction",
            "Share of tokens whose ratio the trainer clipped, as it reports it.",
            most=1,
        ),
    ),
)

_CALLS = Section(
    "Calls",
    (
        Chart(
            "Calls",
            PER_SECOND,
            (Query(rate("paceline_rpc_requests_total", "method"), "{{method}}"),),
            "RPCs ended per second, of all services.",
        ),
        Chart(
            "Calls that ended badly",
            PER_SECOND,
            (
                Query(
                    rate("paceline_rpc_requests_total", "method, code", f'{PLATFORM},code!~"OK|CANCELLED"'),
                    "{{method}} {{code}}",
                ),
            ),
            "By code. INVALID_ARGUMENT and NOT_FOUND are the caller's.",
        ),
        Chart(
            "Failures",
            SHARE,
            (
                Query(
                    share("paceline_rpc_requests_total", "paceline_rpc_requests_total", "method", of=_FAILED),
                    "{{method}}",
                ),
            ),
            "Share of calls that failed through no fault of the caller.",
            limits=Limits(0.01, 0.05),
            most=1,
            runbook="PacelineRpcFailures",
        ),
        Chart(
            "Duration, median",
            SECONDS,
            (Query(quantile(0.5, "paceline_rpc_seconds", "method"), "{{method}}"),),
            "Streams last as long as the batch or sample that they are about.",
        ),
        Chart(
            "Duration, p99",
            SECONDS,
            (Query(quantile(0.99, "paceline_rpc_seconds", "method"), "{{method}}"),),
            "Streams last as long as the batch or sample that they are about.",
        ),
        Chart(
            "Calls running",
            NUMBER,
            (Query(gauge("paceline_rpc_in_flight", "method"), "{{method}}"),),
            "Open streams included.",
        ),
    ),
)

_STATE = Section(
    "State",
    (
        Chart(
            "Instances",
            NUMBER,
            (Query(gauge(f"{_G}instances", "state"), "{{state}}"),),
            "By state. paused: an update is applied, or Redis is away.",
            kind="area",
        ),
        Chart(
            "Journal round trip",
            SECONDS,
            heat(f"{_G}journal_seconds"),
            "Round trips per second by their time. Results are delivered after theirs.",
            kind="heatmap",
        ),
        Chart(
            "Journal errors",
            PER_SECOND,
            (Query(rate(f"{_G}journal_errors_total"), "errors"),),
            "Round trips that failed. They are repeated; nothing is acknowledged meanwhile.",
            runbook="PacelineRedisUnreachable",
        ),
        Chart(
            "Weight updates",
            SECONDS,
            (Query(mean(f"{_G}update_seconds", "phase"), "{{phase}}"),),
            "Mean time of their phases, over all instances.",
        ),
        Chart(
            "Weight updates ended",
            PER_SECOND,
            (Query(rate(f"{_G}updates_total", "outcome"), "{{outcome}}"),),
            "By outcome. After one that failed the fleet serves the version that it had.",
            runbook="PacelineWeightUpdateFailed",
        ),
        Chart(
            "Longest turn of the gateway",
            SECONDS,
            (
                Query(f"max({_G}longest_turn_seconds{{{PLATFORM}}})", "processor time"),
                Query(f"max({_G}longest_turn_wall_seconds{{{PLATFORM}}})", "wall time"),
            ),
            "Calls wait for it. Wall time far above processor time: others have the processor.",
            limits=Limits(0.25, 1),
        ),
        Chart(
            "Rollouts into the draft store",
            PER_SECOND,
            (Query(rate(f"{_G}history_rollouts_total", "outcome"), "{{outcome}}"),),
            "Finished samples that are kept for later steps. not_stored costs drafts.",
        ),
        Chart(
            "Refusals",
            SHARE,
            largest(share(f"{_G}refusals_total", f"{_G}placements_total", "instance_id"), "{{instance_id}}"),
            "Share of samples that an instance would not take when they were given to it.",
        ),
    ),
)

_STORE = Section(
    "Redis",
    (
        Chart(
            "Memory in use",
            SHARE,
            (Query(f"max({_G}redis_memory_ratio{{{PLATFORM}}})", "of maxmemory"),),
            "As the gateway sees it. Above max_redis_memory it accepts no new batch.",
            limits=Limits(0.7, 0.85),
            most=1,
            runbook="PacelineRedisFilling",
        ),
        Chart(
            "Buffers of the gateway",
            SHARE,
            (
                Query(f"max({_G}unwritten_ratio{{{PLATFORM}}})", "results not written"),
                Query(f"max({_G}unfinished_tokens_ratio{{{PLATFORM}}})", "tokens of unfinished samples"),
            ),
            "Full: the gateway pauses, or accepts no new samples.",
            limits=Limits(0.7, 0.95),
            most=1,
            runbook="PacelineResultsUnwritten",
        ),
        Chart(
            "Memory",
            BYTES,
            (
                Query(gauge("redis_memory_used_bytes", "instance", _REDIS), "used {{instance}}"),
                Query(gauge("redis_memory_max_bytes", "instance", _REDIS), "at most {{instance}}"),
            ),
            "Needs redis_exporter. At the limit writes are refused.",
        ),
        Chart(
            "Commands",
            PER_SECOND,
            (Query(rate("redis_commands_processed_total", "instance", _REDIS), "{{instance}}"),),
            "Needs redis_exporter.",
        ),
        Chart(
            "Clients",
            NUMBER,
            (Query(gauge("redis_connected_clients", "instance", _REDIS), "{{instance}}"),),
            "Needs redis_exporter. Every process of the platform has a few connections.",
        ),
        Chart(
            "Keys evicted",
            PER_SECOND,
            (Query(rate("redis_evicted_keys_total", "instance", _REDIS), "{{instance}}"),),
            "Needs redis_exporter. Anything but 0 loses samples: maxmemory-policy must be noeviction.",
            limits=Limits(0.001, 0.001),
            runbook="PacelineRedisEvicting",
        ),
    ),
)

_POLICY = Section(
    "Policy",
    (
        Chart(
            "Decisions",
            PER_SECOND,
            (Query(rate(f"{_P}decisions_total", "kind"), "{{kind}}"),),
            "Changes of knobs, and why: `paceline policy watch` shows each one.",
        ),
        Chart(
            "Instances that work by the latest knobs",
            NUMBER,
            (Query(gauge(f"{_P}instances", "state"), "{{state}}"),),
            "Knobs reach an instance within a second.",
            kind="area",
        ),
        Chart(
            "Cap on draft lengths",
            TOKENS,
            (Query(gauge(f"{_P}draft_cap", "run", RUN, "max"), "{{run}}"),),
            "That a run's ladder has reached.",
        ),
        Chart(
            "Instances",
            NUMBER,
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
    meaning="How the platform and its steps are, what the trainer says of them, and the calls behind them.",
    variables=(NAMESPACES, RELEASES, RUNS, TOP),
    sections=(_WELL, _NOW, _STEPS, _RUNS, _CALLS, _STATE, _STORE, _POLICY),
)
