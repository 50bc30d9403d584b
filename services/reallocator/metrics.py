"""What the reallocator tells Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.reallocator.learned import Learned
from services.reallocator.price import By
from services.reallocator.records import Rule

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
_STEPS = (0.5, 1, 2, 3, 5, 8, 13, 21, 50)
_GAINS = (-0.5, -0.2, -0.1, 0, 0.03, 0.1, 0.2, 0.4, 0.8, 1.6)


class ReallocatorMetrics:
    """All metrics of the reallocator, in one registry. `rule` is why: threshold, level or evacuate."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"paceline_reallocator_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"paceline_reallocator_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"paceline_reallocator_{name}", text, labels, registry=registry, buckets=buckets)

        self.decisions = counter(
            "decisions_total",
            "Decisions: move, keep, or late when the instances took too long to answer.",
            "outcome",
        )
        self.decision_seconds = histogram(
            "decision_seconds", "Deciding, with asking the instances for their samples.", _SECONDS
        )
        self.moves = counter("moves_total", "Samples moved, with their KV or by their prefix.", "rule", "by")
        self.refusals = counter("refusals_total", "Moves refused before anything was sent.", "reason")
        self.failures = counter("failures_total", "Moves given up half-way; nothing was lost.", "reason")
        self.bytes = counter("moved_bytes_total", "KV sent.")
        self.move_seconds = histogram(
            "move_seconds", "One move, from asking for it to its outcome.", _SECONDS
        )
        self.stall_seconds = histogram("stall_seconds", "Time in which a moved sample stood still.", _SECONDS)
        self.stall_steps = histogram("stall_steps", "The same in engine steps of the donor.", _STEPS)
        self.predicted_gain = histogram(
            "predicted_gain", "Predicted gain of a pair's moves, as a share.", _GAINS, "rule"
        )
        self.achieved_gain = histogram(
            "achieved_gain", "Gain in tokens a second that was then measured.", _GAINS, "rule"
        )
        self.trust = gauge("trust", "Share of its predicted gain that a rule has brought.", "rule")
        self.cost_steps = gauge(
            "move_cost_steps", "Engine steps that a moved sample misses, as learned.", "by"
        )
        self.cost_seconds = gauge(
            "move_cost_seconds",
            "Engine time that a move costs the donor or the receiver, as learned.",
            "by",
            "side",
        )
        self.reading = gauge(
            "reading_factor", "Time to read a prefix again over the predicted time, as learned."
        )
        self.threshold = gauge(
            "threshold_samples", "Turning point of an instance's throughput.", "instance_id"
        )
        self.samples = gauge("instance_samples", "Samples on an instance.", "instance_id")
        self.evacuating = gauge("evacuating_instances", "Instances that are being emptied.")
        self.leader = gauge("leader", "1 while this reallocator decides.")
        # A series that begins at 1 hides its first increase from rate().
        for rule in Rule:
            for made in (self.predicted_gain, self.achieved_gain):
                made.labels(rule.value)
            for way in By:
                self.moves.labels(rule.value, way.value)

    def show_learned(self, learned: Learned) -> None:
        """Shows what moves have been found to cost and to bring."""
        for rule, share in learned.trust.shares.items():
            self.trust.labels(rule.value).set(share)
        for way, cost in learned.costs.ways.items():
            self.cost_steps.labels(way.value).set(cost.stall_steps)
            self.cost_seconds.labels(way.value, "donor").set(cost.donor)
            self.cost_seconds.labels(way.value, "receiver").set(cost.receiver)
            if way is By.PREFIX:
                self.reading.set(cost.reading)
