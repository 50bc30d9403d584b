"""Catalogue of the metrics that services register.

`python -m deploy.prometheus.catalogue` writes the list into docs/metrics.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from services.bubbles.service import BubbleMetrics
from services.contracts.drafters import OWN
from services.drafter.metrics import DrafterMetrics
from services.drafts.service import DraftStoreMetrics
from services.drafts.store import DraftStore
from services.facade.metrics import FacadeMetrics
from services.gateway.metrics import GatewayMetrics
from services.generation.loop.metrics import EngineMetrics, PregenerationMetrics
from services.generation.migration.metrics import MigrationMetrics
from services.generation.weights.stream.metrics import WeightStreamMetrics
from services.platform.observability.metrics import rpc_metrics, show_build
from services.platform.redis.connection import redis_errors, redis_up
from services.platform.security.certificates import RELOADS
from services.policy.metrics import PolicyMetrics, ScalingMetrics
from services.reallocator.metrics import ReallocatorMetrics

DOCUMENT = Path(__file__).parents[2] / "docs/metrics.md"
BEGIN, END = "<!-- from here on: python -m deploy.prometheus.catalogue -->", "<!-- to here -->"


def _every(registry: CollectorRegistry) -> None:
    rpc_metrics(registry)
    show_build("any", registry)
    registry.register(redis_up())
    registry.register(redis_errors())
    registry.register(RELOADS)


def _drafters(registry: CollectorRegistry) -> None:
    for drafter in OWN.values():
        make = drafter.load().Metrics
        if make is not None:
            make(registry)


Maker = Callable[[CollectorRegistry], object]

SERVICES: dict[str, tuple[Maker, ...]] = {
    "Every service": (_every,),
    "Gateway": (GatewayMetrics,),
    "Generation instance": (
        EngineMetrics,
        PregenerationMetrics,
        MigrationMetrics,
        WeightStreamMetrics,
        _drafters,
    ),
    "Draft store": (lambda registry: DraftStoreMetrics(registry, DraftStore(1 << 20, 1), lambda: 0.0),),
    "Bubble coordinator": (BubbleMetrics,),
    "Reallocator": (ReallocatorMetrics,),
    "Drafter": (DrafterMetrics,),
    "Policy": (PolicyMetrics, ScalingMetrics),
    "HTTP facade": (FacadeMetrics,),
}


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric under its name in queries; the name of a histogram lacks _bucket, _sum and _count."""

    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str


def metrics(service: str) -> list[Metric]:
    """Return the metrics of a service, by name."""
    found: dict[str, Metric] = {}
    for make in SERVICES[service]:
        registry = CollectorRegistry()
        make(registry)
        found |= {metric.name: metric for metric in _metrics(registry)}
    return [found[name] for name in sorted(found)]


def listing() -> str:
    """Return the list in Markdown."""
    lines: list[str] = []
    for service in SERVICES:
        lines += ["", f"## {service}", ""]
        for metric in metrics(service):
            labels = f"{{{','.join(metric.labels)}}}" if metric.labels else ""
            kind = " (histogram)" if metric.kind == "histogram" else ""
            lines.append(f"- `{metric.name}{labels}`{kind}: {metric.meaning}")
    return "\n".join(lines[1:]) + "\n"


def document(text: str) -> str:
    """Return the document with the current list."""
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n{listing()}\n{END}{tail}"


def _metrics(registry: CollectorRegistry) -> Iterator[Metric]:
    # Only the collectors of prometheus_client know the name of a metric without series.
    suffixes = {"counter": "_total", "info": "_info"}
    for collector in registry._collector_to_names:
        assert isinstance(collector, MetricWrapperBase)
        kind = str(collector._type)
        yield Metric(
            f"{collector._name}{suffixes.get(kind, '')}",
            kind,
            tuple(collector._labelnames),
            collector._documentation,
        )


if __name__ == "__main__":
    DOCUMENT.write_text(document(DOCUMENT.read_text()))
