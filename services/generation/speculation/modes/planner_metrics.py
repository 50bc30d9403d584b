"""Prometheus metrics of the plans of an instance, in all modes."""

from __future__ import annotations

from services.generation.speculation.modes.decision import PlanDecision
from services.platform.observability.metric_set import MetricSet, counter, gauge, histogram

_ERROR_BUCKETS = (0.01, 0.02, 0.04, 0.08, 0.12, 0.2, 0.35, 0.5, 1, 2, 5)


class PlannerMetrics(MetricSet, prefix="paceline_planner_"):
    """Decisions and the accuracy of predicted step times. Used by the engine thread only."""

    decisions = counter("steps_total", "Steps planned, by reason.", "reason")
    tokens = counter("tokens_total", "Draft tokens planned.")
    expected = counter("expected_tokens_total", "Draft tokens expected to be accepted.")
    speedup = gauge(
        "predicted_speedup_ratio", "Predicted tokens per second over plain decoding, of the latest step."
    )
    predicted_seconds = counter(
        "predicted_step_seconds_total", "Predicted time of the steps that were measured."
    )
    measured_seconds = counter("measured_step_seconds_total", "Measured time of the same steps.")
    error = histogram(
        "step_time_error_ratio",
        "Error of a predicted step time, relative to the measured one.",
        _ERROR_BUCKETS,
    )

    def planned(self, decision: PlanDecision) -> None:
        """Count a decision."""
        self.decisions.labels(decision.reason).inc()
        if decision.tokens:
            self.tokens.inc(decision.tokens)
            self.expected.inc(decision.expected)
        self.speedup.set(decision.speedup)

    def predicted(self, predicted: float, measured: float) -> None:
        """Count a measured step with its predicted seconds."""
        self.predicted_seconds.inc(predicted)
        self.measured_seconds.inc(measured)
        self.error.observe(abs(predicted - measured) / measured)
