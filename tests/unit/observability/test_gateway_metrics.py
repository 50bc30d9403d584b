"""Series of the gateway that must come and go at the right time."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from prometheus_client import CollectorRegistry

from paceline.times import STEP_PARTS
from services.gateway.metrics import GatewayMetrics


def series(registry: CollectorRegistry, name: str) -> dict[tuple[str, ...], float]:
    """Values by the values of the labels."""
    return {
        tuple(sample.labels.values()): sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == f"paceline_gateway_{name}"
    }


def test_a_silent_run_is_shown_no_more() -> None:
    registry = CollectorRegistry()
    runs = GatewayMetrics(registry)
    runs.show_run("old", 10.0, step=3, reward=0.5)
    runs.show_run("new", 20.0, step=7)
    runs.forget_runs(before=10.0)
    assert series(registry, "step") == {("old",): 3, ("new",): 7}
    runs.forget_runs(before=20.0)
    assert series(registry, "step") == {("new",): 7}
    assert series(registry, "reward") == {}
    runs.show_run("old", 30.0, reported_kl=0.1)
    runs.forget_runs(before=25.0)
    assert series(registry, "step") == {}
    assert series(registry, "reported_kl") == {("old",): 0.1}


def test_a_run_that_is_still_heard_of_stays() -> None:
    registry = CollectorRegistry()
    runs = GatewayMetrics(registry)
    runs.show_run("run", 10.0, step=1)
    runs.show_run("run", 50.0, lenience=2.0)
    runs.forget_runs(before=40.0)
    assert series(registry, "step") == {("run",): 1}


def test_instances_are_shown_until_they_are_forgotten() -> None:
    registry = CollectorRegistry()
    metrics = GatewayMetrics(registry)
    metrics.running.labels("a").set(3)
    metrics.show_instances({"a": True, "b": False}, set())
    assert series(registry, "instance_up") == {("a",): 1, ("b",): 0}
    metrics.show_instances({"b": True}, {"a"})
    assert series(registry, "instance_up") == {("b",): 1}
    assert series(registry, "running_samples") == {}


def test_runs_beyond_a_number_are_shown_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.metrics._MOST_RUNS", 10)
    registry = CollectorRegistry()
    runs = GatewayMetrics(registry)
    for number in range(50):
        runs.show_run(f"run-{number}", float(number), step=number, reward=1.0)
        runs.show_run("heard of", float(number), step=number)
    assert series(registry, "step").keys() == {*((f"run-{n}",) for n in range(41, 50)), ("heard of",)}
    assert len(series(registry, "reward")) == 9


def test_counters_of_instances_that_never_come_back_go_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.metrics._MOST_GONE", 10)
    registry = CollectorRegistry()
    metrics = GatewayMetrics(registry)
    metrics.show_instances({"stays": True}, ())
    for name in ("stays", *(f"pod-{number}" for number in range(50))):
        metrics.tokens.labels(name).inc()
        metrics.placements.labels(name).inc()
        metrics.losses.labels(name).inc()
        metrics.refused(name, 8)
        metrics.refused(name, 14)
    for number in range(50):
        metrics.show_instances({f"pod-{number}": True}, ())
        metrics.show_instances({}, {f"pod-{number}"})
        # One that restarts under its name keeps its counters.
        metrics.show_instances({}, {"stays"})
        metrics.show_instances({"stays": True}, ())
    left = {("stays",), *((f"pod-{number}",) for number in range(41, 50))}
    for name in ("tokens_total", "placements_total", "instance_losses_total"):
        assert series(registry, name).keys() == left, name
    assert {key[:1] for key in series(registry, "refusals_total")} == left
    assert len(series(registry, "refusals_total")) == 2 * len(left)
    assert series(registry, "instance_up").keys() == {("stays",)}


def test_refusals_are_counted_by_the_name_of_their_code() -> None:
    registry = CollectorRegistry()
    metrics = GatewayMetrics(registry)
    metrics.refused("a", 8)
    metrics.refused("a", 99)
    assert series(registry, "refusals_total") == {("a", "RESOURCE_EXHAUSTED"): 1, ("a", "99"): 1}


def test_what_alerts_watch_is_there_before_it_happens() -> None:
    registry = CollectorRegistry()
    GatewayMetrics(registry)
    wanted: Mapping[str, set[str]] = {
        "samples_total": {"completed", "truncated", "aborted", "failed"},
        "updates_total": {"published", "aborted", "failed", "abandoned"},
        "expired_samples_total": set(),
        "step_part_seconds_total": {*STEP_PARTS, "trainer", "weights"},
    }
    for name, labels in wanted.items():
        found = series(registry, name)
        assert set(found.values()) == {0.0}, name
        assert {value for key in found for value in key} == labels


def test_whole_samples_are_counted_by_level() -> None:
    registry = CollectorRegistry()
    metrics = GatewayMetrics(registry)
    metrics.count_whole("lenient", tokens=10, cached=8, reused=4)
    metrics.count_whole("lenient", tokens=8, cached=8, reused=8)
    metrics.count_whole("exact", tokens=5, cached=0, reused=0)
    expected = {
        "whole_samples_total": (2, 1),
        "whole_sample_tokens_total": (18, 5),
        "cached_samples_total": (2, 0),
        "cached_tokens_total": (16, 0),
        "reused_prefix_tokens_total": (12, 0),
        "fully_reused_samples_total": (1, 0),
    }
    for name, (lenient, exact) in expected.items():
        found = series(registry, name)
        assert (found["lenient",], found["exact",], found["rejection",]) == (lenient, exact, 0), name
