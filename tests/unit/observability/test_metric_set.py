"""Metrics that are declared as class attributes."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from services.platform.observability.metrics import MetricSet, counter, gauge, histogram


class _Base(MetricSet, prefix="paceline_demo_"):
    leader = gauge("leader", "Whether it leads.")


class _Demo(_Base):
    pushes = counter("pushes_total", "Pushes.", "outcome", values=("applied", "failed"))
    seconds = histogram("seconds", "Durations.", (0.5, 1.0), "phase")


def test_declared_metrics_are_registered_under_the_prefix_and_usable() -> None:
    registry = CollectorRegistry()
    metrics = _Demo(registry)
    metrics.leader.set(1)
    metrics.pushes.labels("applied").inc(3)
    metrics.seconds.labels("stage").observe(0.7)
    assert registry.get_sample_value("paceline_demo_leader") == 1
    assert registry.get_sample_value("paceline_demo_pushes_total", {"outcome": "applied"}) == 3
    assert registry.get_sample_value("paceline_demo_seconds_bucket", {"phase": "stage", "le": "0.5"}) == 0
    assert registry.get_sample_value("paceline_demo_seconds_bucket", {"phase": "stage", "le": "1.0"}) == 1


def test_named_values_begin_at_zero() -> None:
    registry = CollectorRegistry()
    _Demo(registry)
    assert registry.get_sample_value("paceline_demo_pushes_total", {"outcome": "failed"}) == 0


def test_each_registry_has_metrics_of_its_own() -> None:
    first, second = CollectorRegistry(), CollectorRegistry()
    _Demo(first).leader.set(1)
    _Demo(second)
    assert second.get_sample_value("paceline_demo_leader") == 0
    assert b"paceline_demo_leader 1.0" in generate_latest(first)


def test_a_metric_is_not_to_be_had_before_there_is_a_registry() -> None:
    with pytest.raises(AttributeError, match="leader"):
        _ = _Demo.leader
