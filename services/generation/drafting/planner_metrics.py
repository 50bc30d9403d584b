"""Prometheus metrics of the draft planner."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.generation.drafting.planner import Decision

_ERROR_BUCKETS = (0.01, 0.02, 0.04, 0.08, 0.12, 0.2, 0.35, 0.5, 1, 2, 5)


class PlannerMetrics:
    """What the planner decides and how well it predicts. Used by the engine thread only."""

    def __init__(self, registry: CollectorRegistry) -> None:
        prefix = "paceline_planner_"
        self.decisions = Counter(
            f"{prefix}steps_total", "Steps planned, by reason.", ["reason"], registry=registry
        )
        self.tokens = Counter(f"{prefix}tokens_total", "Draft tokens planned.", registry=registry)
        self.expected = Counter(
            f"{prefix}expected_tokens_total", "Draft tokens expected to be kept.", registry=registry
        )
        self.speedup = Gauge(
            f"{prefix}predicted_speedup_ratio",
            "Predicted tokens a second over plain decoding, of the latest step.",
            registry=registry,
        )
        self.predicted_seconds = Counter(
            f"{prefix}predicted_step_seconds_total",
            "Step time of the steps that were measured, predicted.",
            registry=registry,
        )
        self.measured_seconds = Counter(
            f"{prefix}measured_step_seconds_total",
            "Step time of the same steps, measured.",
            registry=registry,
        )
        self.error = Histogram(
            f"{prefix}step_time_error_ratio",
            "How far a predicted step time was off, over the measured one.",
            buckets=_ERROR_BUCKETS,
            registry=registry,
        )

    def planned(self, decision: Decision) -> None:
        """Count a decision."""
        self.decisions.labels(decision.reason).inc()
        if decision.tokens:
            self.tokens.inc(decision.tokens)
            self.expected.inc(decision.expected)
        self.speedup.set(decision.speedup)

    def predicted(self, predicted: float, measured: float) -> None:
        """Count a step whose time, in seconds, had been predicted."""
        self.predicted_seconds.inc(predicted)
        self.measured_seconds.inc(measured)
        if measured > 0:
            self.error.observe(abs(predicted - measured) / measured)
