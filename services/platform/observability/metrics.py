"""Prometheus metrics of every process: rate, errors and duration of RPCs, version, and memory in use."""

from __future__ import annotations

from importlib import metadata
from weakref import WeakKeyDictionary

from prometheus_client import REGISTRY, CollectorRegistry, Gauge, Info

from services.contracts.errors import PermissionDenied, ResourceExhausted
from services.platform.memory import own_memory_share
from services.platform.observability.metric_set import MetricSet, counter, gauge, histogram
from services.platform.security.caller import current_caller

RPC_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)
"""Bucket borders of RPC durations, in seconds: from a status query to a stream of a whole step."""


class RpcMetrics(MetricSet, prefix="paceline_rpc_"):
    """Rate, errors and duration of RPCs by component and method ("package.Service/Method").

    The label is not `service`, which Kubernetes uses for the target of a scrape.
    """

    requests = counter("requests_total", "RPCs ended.", "component", "method", "code")
    seconds = histogram("seconds", "Duration of RPCs.", RPC_SECONDS, "component", "method")
    in_flight = gauge("in_flight", "RPCs running now.", "component", "method")
    refused = counter(
        "refused_total",
        "RPCs refused, by the token's name and reason: MISSING_SCOPE, RUN_NOT_GRANTED, or what was used up, "
        "such as requests, max_queued_samples and max_queued_tokens.",
        "component",
        "grant",
        "reason",
    )

    def count_refusal(self, component: str, error: Exception) -> None:
        """Count an error if it refuses the current caller for its permissions or limits."""
        caller = current_caller()
        if caller is not None and isinstance(error, PermissionDenied | ResourceExhausted):
            self.refused.labels(component, caller.name, error.reason).inc()


_rpc_metrics: WeakKeyDictionary[CollectorRegistry, RpcMetrics] = WeakKeyDictionary()


def rpc_metrics(registry: CollectorRegistry) -> RpcMetrics:
    """Return the RPC metrics of a registry, which all servers of a process share."""
    if registry not in _rpc_metrics:
        _rpc_metrics[registry] = RpcMetrics(registry)
    return _rpc_metrics[registry]


def show_build(component: str, registry: CollectorRegistry = REGISTRY) -> None:
    """Publish component, version and memory use of this process."""
    info = Info("paceline_build", "The component and its version.", registry=registry)
    info.info({"component": component, "version": metadata.version("paceline")})
    memory = Gauge(
        "paceline_memory_ratio",
        "Memory of this process's control group (container) over its limit; 0: no limit.",
        registry=registry,
    )
    memory.set_function(own_memory_share)
