"""Prometheus metrics of the reallocator."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from services.platform.observability.metrics import MetricSet, counter, gauge, histogram
from services.reallocator.planning.learned_costs import LearnedCosts
from services.reallocator.planning.records import MoveBy, Rule

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
_STEPS = (0.5, 1, 2, 3, 5, 8, 13, 21, 50)
_GAINS = (-0.5, -0.2, -0.1, 0, 0.03, 0.1, 0.2, 0.4, 0.8, 1.6)


class ReallocatorMetrics(MetricSet, prefix="paceline_reallocator_"):
    """All metrics of the service. Label `rule`: threshold, balance or evacuate; label `by`: kv or prefix."""

    decisions = counter(
        "decisions_total", "Decisions: move, keep, or late if instances answered too late.", "outcome"
    )
    decision_seconds = histogram(
        "decision_seconds", "Time of a decision, including listing samples.", _SECONDS
    )
    moves = counter("moves_total", "Samples moved, by KV or by prefix.", "rule", "by")
    refusals = counter("refusals_total", "Moves refused before anything was sent.", "reason")
    failures = counter("failures_total", "Moves given up half-way; nothing was lost.", "reason")
    bytes = counter("moved_bytes_total", "KV sent.")
    move_seconds = histogram("move_seconds", "Time from a move's request to its outcome.", _SECONDS)
    stall_seconds = histogram("stall_seconds", "Pause of a moved sample.", _SECONDS)
    stall_steps = histogram("stall_steps", "Pause of a moved sample in engine steps of the donor.", _STEPS)
    predicted_gain = histogram("predicted_gain", "Predicted relative gain of a pair's moves.", _GAINS, "rule")
    achieved_gain = histogram("achieved_gain", "Measured relative gain in tokens per second.", _GAINS, "rule")
    trust = gauge("trust", "Share of a rule's predicted gain achieved.", "rule")
    cost_steps = gauge("move_cost_steps", "Engine steps that a moved sample misses, as learned.", "by")
    cost_seconds = gauge(
        "move_cost_seconds", "Engine time that a move costs donor or receiver, as learned.", "by", "side"
    )
    prefill_factor = gauge(
        "prefill_factor", "Measured over predicted time to prefill a moved prefix, as learned."
    )
    threshold = gauge(
        "saturation_point_samples", "Saturation point of an instance in samples.", "instance_id"
    )
    samples = gauge("instance_samples", "Samples on an instance.", "instance_id")
    evacuating = gauge("evacuating_instances", "Instances being emptied.")
    leader = gauge("leader", "1 while this process leads.")

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        # A series that begins at 1 hides its first increase from rate().
        for rule in Rule:
            for gain in (self.predicted_gain, self.achieved_gain):
                gain.labels(rule.value)
            for way in MoveBy:
                self.moves.labels(rule.value, way.value)

    def forget_instance(self, instance_id: str) -> None:
        """Remove the series of an instance that is gone."""
        for shown in (self.samples, self.threshold):
            shown.remove(instance_id)

    def show_learned(self, learned: LearnedCosts) -> None:
        """Set the gauges of learned costs and trust."""
        for rule, share in learned.trust.shares.items():
            self.trust.labels(rule.value).set(share)
        for way, cost in learned.costs.ways.items():
            self.cost_steps.labels(way.value).set(cost.stall_steps)
            self.cost_seconds.labels(way.value, "donor").set(cost.donor)
            self.cost_seconds.labels(way.value, "receiver").set(cost.receiver)
            if way is MoveBy.PREFIX:
                self.prefill_factor.set(cost.prefill)
