"""Metrics from Prometheus's text, and what was added between two readings."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from bench.scrape import Metrics, parse, together


def test_values_are_summed_over_labels_and_kept_by_label() -> None:
    registry = CollectorRegistry()
    counter = Counter("work", "Work.", ["kind"], registry=registry)
    counter.labels("a").inc(2)
    counter.labels("b").inc(3)
    Gauge("level", "Level.", registry=registry).set(7)
    found = parse(generate_latest(registry).decode())
    assert found["work_total"] == 5
    assert found['work_total{kind="a"}'] == 2
    assert found["level"] == 7
    assert found["unknown"] == 0


def test_a_metric_is_told_by_the_values_of_its_label() -> None:
    registry = CollectorRegistry()
    counter = Counter("work", "Work.", ["kind"], registry=registry)
    for kind, count in (("a", 2), ("b", 0)):
        counter.labels(kind).inc(count)
    Counter("work_more", "More work.", ["kind"], registry=registry).labels("c").inc()
    assert parse(generate_latest(registry).decode()).labelled("work_total") == {"a": 2}


def test_the_mean_of_a_histogram_is_of_what_was_added() -> None:
    registry = CollectorRegistry()
    histogram = Histogram("delay", "Delay.", registry=registry)
    histogram.observe(100)
    before = parse(generate_latest(registry).decode())
    assert parse(generate_latest(registry).decode()).since(before).mean("delay") is None
    histogram.observe(1)
    histogram.observe(2)
    added = parse(generate_latest(registry).decode()).since(before)
    assert added.mean("delay") == 1.5


def test_processes_add_up() -> None:
    assert together([Metrics({"a": 1.0}), Metrics({"a": 2.0, "b": 3.0})]).values == {"a": 3.0, "b": 3.0}
