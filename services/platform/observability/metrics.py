"""Declare Prometheus metrics as class attributes, and the metrics of every process.

class PolicyMetrics(MetricSet, prefix="paceline_policy_"):
    leader = gauge("leader", "1 while this process leads.")
    pushes = counter("pushes_total", "Knobs sent to instances.", "outcome", values=("applied", "failed"))
    push_seconds = histogram("push_seconds", "Time until an instance uses new knobs.", SECONDS)

metrics = PolicyMetrics(CollectorRegistry())
metrics.pushes.labels("applied").inc()

Every process has the rate, errors and duration of its RPCs, its version, and its memory in use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, Info

from services.contracts.errors import PermissionDenied, ResourceExhausted
from services.platform.memory import own_memory_share
from services.platform.security.caller import current_caller

Metric = TypeVar("Metric", Counter, Gauge, Histogram)


class Declared(Generic[Metric]):
    """Declaration of one metric; a `MetricSet` replaces it by the metric itself."""

    def __init__(self, make: Callable[[str, CollectorRegistry], Metric], name: str) -> None:
        self.make: Callable[[str, CollectorRegistry], Metric] = make
        self.name = name

    def __get__(self, instance: object, owner: type) -> Metric:
        raise AttributeError(f"{owner.__name__} was not initialised: metric {self.name} does not exist yet")


def counter(name: str, meaning: str, *labels: str, values: Iterable[str] = ()) -> Declared[Counter]:
    """Declare a counter. Its series for each of `values` (of its only label) exist from the start.

    A series that begins at 1 would hide its first increase from rate().
    """

    def make(prefix: str, registry: CollectorRegistry) -> Counter:
        made = Counter(prefix + name, meaning, labels, registry=registry)
        for value in values:
            made.labels(value)
        return made

    return Declared(make, name)


def gauge(name: str, meaning: str, *labels: str) -> Declared[Gauge]:
    """Declare a gauge."""
    return Declared(lambda prefix, registry: Gauge(prefix + name, meaning, labels, registry=registry), name)


def histogram(name: str, meaning: str, buckets: Sequence[float], *labels: str) -> Declared[Histogram]:
    """Declare a histogram with these upper bounds of its buckets."""

    def make(prefix: str, registry: CollectorRegistry) -> Histogram:
        return Histogram(prefix + name, meaning, labels, registry=registry, buckets=buckets)

    return Declared(make, name)


class MetricSet:
    """Base class of a service's metrics: registers every declared metric under `prefix` when it is created."""

    _prefix = ""

    def __init_subclass__(cls, *, prefix: str = "") -> None:
        cls._prefix = prefix or cls._prefix

    def __init__(self, registry: CollectorRegistry) -> None:
        for owner in reversed(type(self).__mro__):
            for attribute, declared in vars(owner).items():
                if isinstance(declared, Declared):
                    setattr(self, attribute, declared.make(self._prefix, registry))


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
