"""What scaling tells Prometheus."""

from __future__ import annotations

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge

from services.policy.scaling.errors import ClusterError

log = structlog.get_logger(__name__)


class ScalingMetrics:
    """All metrics of scaling, in one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"paceline_scaling_{name}", text, labels, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"paceline_scaling_{name}", text, labels, registry=registry)

        self.recommended = gauge("recommended_replicas", "Instances that there should be.", "pool")
        self.wanted = gauge("wanted_replicas", "Those that patience lets through.", "pool")
        self.replicas = gauge("replicas", "Replicas that the StatefulSet is meant to have.", "pool")
        self.draining = gauge("draining", "1 while an instance is evacuated to be removed.", "pool")
        self.bubble_share = gauge(
            "bubble_ratio", "Share of instance time within steps in which an instance had no sample."
        )
        self.rate = gauge("instance_tokens_per_second", "Throughput of a well-filled instance.", "pool")
        self.leader = gauge("leader", "1 while this controller has the Lease.")
        self.changes = counter(
            "changes_total",
            "Changes of a StatefulSet: up, down; and evacuations that were cancelled or failed.",
            "pool",
            "change",
        )
        self.errors = counter(
            "errors_total",
            "Calls that failed, by what was called and how: unreachable, conflict, forbidden, not_found, failed.",
            "call",
            "kind",
        )
        self._reported: dict[str, str] = {}

    def failed(self, call: str, error: ClusterError | str) -> None:
        """Counts a failed call; one that goes on failing in the same way is logged once."""
        kind = error.kind if isinstance(error, ClusterError) else "unreachable"
        self.errors.labels(call, kind).inc()
        if self._reported.get(call) != kind:
            self._reported[call] = kind
            log.warning("scaling_call_failed", call=call, kind=kind, error=str(error))

    def succeeded(self, call: str) -> None:
        """The next failure is news again."""
        self._reported.pop(call, None)
