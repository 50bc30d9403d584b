"""Prometheus metrics of the policy service."""

from __future__ import annotations

from services.platform.observability.metric_set import MetricSet, counter, gauge, histogram

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10)


class PolicyMetrics(MetricSet, prefix="paceline_policy_"):
    """All metrics of the service."""

    leader = gauge("leader", "1 while this process leads.")
    revision = gauge("revision", "Latest revision of any knob.")
    instances = gauge("instances", "Instances, by whether they use the latest knobs.", "state")
    pushes = counter("pushes_total", "Knobs sent to instances, by outcome.", "outcome")
    push_seconds = histogram(
        "push_seconds", "Time from a change of knobs until an instance uses it.", _SECONDS
    )
    decisions = counter("decisions_total", "Decisions, by kind.", "kind")
    draft_cap = gauge("draft_cap", "Cap on draft lengths of a run's ladder.", "run")
    block_efficiency = gauge(
        "step_block_efficiency", "Tokens per verified draft in the last ended step of any run."
    )
