"""Dashboard of the services: their calls, the gateway's state, Redis, and the policy's decisions."""

from deploy.grafana.board import (
    BYTES,
    NAMESPACES,
    NUMBER,
    PER_SECOND,
    PLATFORM,
    RELEASES,
    RUN,
    RUNS,
    SECONDS,
    SHARE,
    TOKENS,
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
    rate,
    share,
)

_G = "paceline_gateway_"
_P = "paceline_policy_"
_S = "paceline_scaling_"
_FAILED = f'{PLATFORM},code=~"INTERNAL|UNKNOWN|DATA_LOSS|UNAVAILABLE|DEADLINE_EXCEEDED"'
_REDIS = 'namespace=~"$namespace"'
"""Selector of redis_exporter, which may be outside the release."""

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
            "Failed calls",
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
            "Needs redis_exporter. Above 0 samples are lost: maxmemory-policy must be noeviction.",
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
            "Instances that use the latest knobs",
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
            "Recommended: for the work that there is. Wanted: after stabilization, which delays changes.",
        ),
    ),
)

SERVICES = Board(
    uid="paceline-services",
    title="Paceline / Services",
    meaning="Calls between the services, state of gateway and Redis, and decisions of the policy.",
    variables=(NAMESPACES, RELEASES, RUNS, TOP),
    sections=(_CALLS, _STATE, _STORE, _POLICY),
)
