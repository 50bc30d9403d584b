"""What the policy service tells Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10)


class PolicyMetrics:
    """All metrics of the service, in one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        prefix = "paceline_policy_"
        self.leader = Gauge(f"{prefix}leader", "1 while this process leads.", registry=registry)
        self.revision = Gauge(f"{prefix}revision", "Latest revision of any knob.", registry=registry)
        self.instances = Gauge(
            f"{prefix}instances",
            "Instances by whether they work by the latest knobs.",
            ["state"],
            registry=registry,
        )
        self.pushes = Counter(
            f"{prefix}pushes_total", "Knobs sent to instances, by outcome.", ["outcome"], registry=registry
        )
        self.push_seconds = Histogram(
            f"{prefix}push_seconds",
            "From a change of knobs until an instance works by it.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.decisions = Counter(
            f"{prefix}decisions_total", "Decisions, by kind.", ["kind"], registry=registry
        )
        self.draft_cap = Gauge(
            f"{prefix}draft_cap",
            "Cap on draft lengths that a run's ladder has reached.",
            ["run"],
            registry=registry,
        )
        self.block_efficiency = Gauge(
            f"{prefix}step_block_efficiency",
            "Tokens per verified draft in the step that ended last, of any run.",
            registry=registry,
        )
