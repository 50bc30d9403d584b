"""Prometheus metrics of the policy service and of scaling, and the errors that these count."""

from __future__ import annotations

import structlog
from prometheus_client import CollectorRegistry

from services.platform.observability.metrics import MetricSet, counter, gauge, histogram

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


log = structlog.get_logger(__name__)


class ScalingError(Exception):
    """Raised when a call that scaling makes fails; `kind` is a label of metrics."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


class GatewayError(ScalingError):
    """Raised when the gateway does not answer, or refuses."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "unreachable")


class UnknownInstance(GatewayError):
    """Raised when the gateway has no connection to the instance."""


class ClusterError(ScalingError):
    """Raised when a call to the Kubernetes API fails.

    Of kind "unreachable" try again: the API is down or overloaded. Of kind "forbidden" correct the role of the
    service account, which lacks a permission.
    """

    def __init__(self, message: str, kind: str = "failed") -> None:
        super().__init__(message, kind)


class ApiConflict(ClusterError):
    """Raised when the object has changed since it was read: read it again."""


class ApiNotFound(ClusterError):
    """Raised when the object does not exist."""


class ScalingMetrics(MetricSet, prefix="paceline_scaling_"):
    """All metrics of scaling."""

    recommended = gauge("recommended_replicas", "Instances recommended for the pool.", "pool")
    wanted = gauge("wanted_replicas", "Instances wanted after stabilization.", "pool")
    replicas = gauge("replicas", "Desired replicas of the StatefulSet.", "pool")
    draining = gauge("draining", "1 while an instance is evacuated for removal.", "pool")
    bubble_share = gauge(
        "bubble_ratio", "Share of instance time within steps in which an instance had no sample."
    )
    rate = gauge("instance_tokens_per_second", "Throughput of a well-filled instance.", "pool")
    leader = gauge("leader", "1 while this controller holds the Lease.")
    changes = counter(
        "changes_total",
        "Changes of a StatefulSet: up, down; evacuations cancelled or failed.",
        "pool",
        "change",
    )
    errors = counter(
        "errors_total", "Failed calls: unreachable, conflict, forbidden, not_found, failed.", "call", "kind"
    )

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self._logged: dict[str, str] = {}

    def failed(self, call: str, error: ScalingError) -> None:
        """Count a failed call, and log it unless the call failed in the same way before."""
        self.errors.labels(call, error.kind).inc()
        if self._logged.get(call) != error.kind:
            self._logged[call] = error.kind
            log.warning("scaling_call_failed", call=call, kind=error.kind, error=str(error))

    def succeeded(self, call: str) -> None:
        """Note a success: the next failure of the call is logged again."""
        self._logged.pop(call, None)
