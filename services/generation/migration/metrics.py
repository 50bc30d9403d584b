"""Prometheus metrics of migration. A donor counts a move, a receiver what arrives."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from paceline.internal.v1 import migration_pb2 as pb
from services.generation.migration.reason import Reason
from services.generation.migration.receiver import State

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_STEPS = (0.25, 0.5, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 32, 64)
_OUTCOMES = {
    pb.MOVE_OUTCOME_MOVED: "moved",
    pb.MOVE_OUTCOME_REFUSED: "refused",
    pb.MOVE_OUTCOME_FAILED: "failed",
}


class MigrationMetrics:
    """Counters and histograms, on one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        prefix = "paceline_migration_"
        self._moves = Counter(
            f"{prefix}moves_total",
            "Moves that this instance was asked for as the donor: moved with their KV, handed_on by their prefix, "
            "refused or failed; the reason is empty for those that came about.",
            ["outcome", "reason"],
            registry=registry,
        )
        self._arrivals = Counter(
            f"{prefix}arrivals_total",
            "Samples that were to come here, by how far they got: cancelled, committed, claimed, expired.",
            ["state"],
            registry=registry,
        )
        self._refusals = Counter(
            f"{prefix}refusals_total", "Reservations refused as the receiver.", ["reason"], registry=registry
        )
        self._bytes = Counter(
            f"{prefix}bytes_total",
            "KV sent: copied while the sample decoded on, or delta while it was frozen.",
            ["stage"],
            registry=registry,
        )
        self._stages = Histogram(
            f"{prefix}stage_seconds",
            "Time to reserve, to copy while the sample decodes on, and for which it is frozen (stall).",
            ["stage"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._stall_steps = Histogram(
            f"{prefix}stall_steps",
            "Time for which a sample was frozen, in engine steps of the donor.",
            buckets=_STEPS,
            registry=registry,
        )
        self._resume = Histogram(
            f"{prefix}resume_seconds",
            "From the receiver's commitment to the end of its first step with the sample.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.unclaimed = Gauge(
            f"{prefix}unclaimed_samples",
            "Samples that have arrived and that no gateway has claimed yet.",
            registry=registry,
        )
        # A series that begins at 1 hides its first increase from rate().
        for outcome in ("moved", "handed_on"):
            self._moves.labels(outcome, "")
        for stage in ("reserve", "copy", "stall"):
            self._stages.labels(stage)
        for state in (State.COMMITTED, State.CLAIMED):
            self._arrivals.labels(state.name.lower())

    def moved(self, migration: pb.Migration) -> None:
        """A move that this instance made or tried is over."""
        reason = Reason.of(migration.reason).name.lower() if migration.reason else ""
        handed_on = migration.by == pb.MOVE_BY_PREFIX and migration.outcome == pb.MOVE_OUTCOME_MOVED
        self._moves.labels("handed_on" if handed_on else _OUTCOMES[migration.outcome], reason).inc()
        if handed_on:
            return
        self._bytes.labels("copy").inc(migration.copied_bytes)
        self._bytes.labels("delta").inc(migration.delta_bytes)
        if migration.outcome != pb.MOVE_OUTCOME_MOVED:
            return
        self._stages.labels("reserve").observe(migration.reserve_seconds)
        self._stages.labels("copy").observe(migration.copy_seconds)
        self._stages.labels("stall").observe(migration.stall_seconds)
        self._stall_steps.observe(migration.stall_steps)

    def refused(self, reason: Reason) -> None:
        """A reservation was refused here."""
        self._refusals.labels(reason.name.lower()).inc()

    def arrived(self, state: State) -> None:
        """A sample that was to come has got so far."""
        self._arrivals.labels(state.name.lower()).inc()

    def resumed(self, seconds: float) -> None:
        """The first step with a sample ended so long after it was committed."""
        self._resume.observe(seconds)
