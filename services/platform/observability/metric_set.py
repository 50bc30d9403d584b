"""Declare the Prometheus metrics of a service as class attributes.

class PolicyMetrics(MetricSet, prefix="paceline_policy_"):
    leader = gauge("leader", "1 while this process leads.")
    pushes = counter("pushes_total", "Knobs sent to instances.", "outcome", values=("applied", "failed"))
    push_seconds = histogram("push_seconds", "Time until an instance uses new knobs.", SECONDS)

metrics = PolicyMetrics(CollectorRegistry())
metrics.pushes.labels("applied").inc()
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

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
