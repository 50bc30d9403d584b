"""Read the Prometheus metrics of the platform's processes."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from services.local import Platform

_TIMEOUT = 30.0


@dataclass(frozen=True, slots=True)
class Metrics:
    """Metric values of one process: `name` summed over its label sets, `name{label="value"}` for each set.

    Counters end in _total; histograms have _sum and _count.
    """

    values: Mapping[str, float] = field(default_factory=dict)

    def __getitem__(self, name: str) -> float:
        return self.values.get(name, 0.0)

    def labelled(self, name: str) -> dict[str, float]:
        """Return the nonzero values of a metric with one label, by the value of the label."""
        begin = f"{name}{{"
        return {
            key[len(begin) :].split('"')[1]: value
            for key, value in self.values.items()
            if key.startswith(begin) and value
        }

    def since(self, before: Metrics) -> Metrics:
        """Return the increase since an earlier reading."""
        return Metrics({name: value - before[name] for name, value in self.values.items()})

    def mean(self, histogram: str) -> float | None:
        """Return the mean of a histogram's observations; None without observations."""
        count = self[f"{histogram}_count"]
        return self[f"{histogram}_sum"] / count if count else None


def parse(text: str) -> Metrics:
    """Parse metrics in the Prometheus text format."""
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            values[sample.name] = values.get(sample.name, 0.0) + sample.value
            if sample.labels:
                labels = ",".join(f'{name}="{value}"' for name, value in sample.labels.items())
                values[f"{sample.name}{{{labels}}}"] = sample.value
    return Metrics(values)


def together(all_metrics: Iterable[Metrics]) -> Metrics:
    """Return the sum over processes."""
    values: dict[str, float] = {}
    for metrics in all_metrics:
        for name, value in metrics.values.items():
            values[name] = values.get(name, 0.0) + value
    return Metrics(values)


def scrape(platform: Platform) -> dict[str, Metrics]:
    """Return the metrics of every ready process, by its name."""
    found = {}
    for child in platform.processes:
        if child.alive and child.ready is not None:
            found[child.spec.name] = metrics_at(child.ready.metrics_port, platform.config.token)
    return found


def metrics_at(port: int, token: str | None) -> Metrics:
    """Return the metrics of a process on this machine, read with a bearer token."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers=headers)
    with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:
        return parse(answer.read().decode())
