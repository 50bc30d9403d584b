"""Report and Prometheus metrics of moves. A donor counts moves, a receiver counts arrivals."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from paceline.internal.v1 import migration_pb2 as pb
from paceline.times import duration, seconds_of
from services.generation.kv_transfer.reason import Reason
from services.generation.migration.protocol import Donor, ReceiverState, Stage
from services.platform.observability.metrics import MetricSet, counter, gauge, histogram
from services.platform.observability.tracing import NO_SPAN, TraceSpan


@dataclass(slots=True)
class MoveReport:
    """Recorder of a move at the donor: the times of its stages, the stall, and the outcome.

    Times are monotonic seconds; `span` is part of the sample's trace.
    """

    message: pb.Migration
    began: float = field(default_factory=time.monotonic)
    span: TraceSpan = field(default=NO_SPAN)
    _paused_at: float = 0.0

    def paused(self) -> None:
        """Start the stall."""
        self._paused_at = time.monotonic()
        self.span.event("paused")

    def resumed(self) -> None:
        """End the stall, because the sample decodes again, here or at the receiver. The last call counts."""
        if self._paused_at:
            self.message.stall_time.CopyFrom(duration(time.monotonic() - self._paused_at))

    def passed(self, stage: Stage, seconds: float) -> None:
        """Record the time of a stage."""
        if stage is Stage.RESERVING:
            self.message.reserve_time.CopyFrom(duration(seconds))
        elif stage is Stage.COPYING:
            self.message.copy_time.CopyFrom(duration(seconds))
        elif stage is not Stage.RELEASING:
            # While it is released here, the sample runs at the receiver already.
            self.resumed()

    def close(self, donor: Donor, step_seconds: float) -> None:
        """Record the outcome; `step_seconds` is the time of a step of the donor."""
        message, moved = self.message, donor.moved
        message.total_time.CopyFrom(duration(time.monotonic() - self.began))
        message.stall_steps = seconds_of(message.stall_time) / step_seconds if step_seconds > 0 else 0.0
        message.state = pb.MIGRATION_STATE_COMMITTED if moved else pb.MIGRATION_STATE_CANCELLED
        if moved:
            message.outcome = pb.MOVE_OUTCOME_MOVED
        else:
            message.outcome = pb.MOVE_OUTCOME_REFUSED if donor.refused else pb.MOVE_OUTCOME_FAILED
            message.reason = (donor.reason or Reason.INTERNAL).value
            message.message = donor.message
        self.span.end(
            message.message if message.outcome == pb.MOVE_OUTCOME_FAILED else "",
            outcome=outcome_name(message),
            response_tokens=message.response_tokens,
            copied_bytes=message.copied_bytes,
            delta_bytes=message.delta_bytes,
            stall_seconds=seconds_of(message.stall_time),
        )


def outcome_name(message: pb.Migration) -> str:
    """Return the outcome of a move in lower case, such as "moved"."""
    return pb.MoveOutcome.Name(message.outcome).removeprefix("MOVE_OUTCOME_").lower()


def refused(message: pb.Migration, reason: Reason, text: str) -> pb.Migration:
    """Fill in the report of a move that was refused before it began."""
    message.state, message.outcome = pb.MIGRATION_STATE_CANCELLED, pb.MOVE_OUTCOME_REFUSED
    message.reason, message.message = reason.value, text
    return message


_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_STEPS = (0.25, 0.5, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 32, 64)


class MigrationMetrics(MetricSet, prefix="paceline_migration_"):
    """Metrics of migration, of the donor's side and the receiver's."""

    _moves = counter(
        "moves_total",
        "Moves with this instance as the donor: moved with their KV, handed_on by their prefix (both without "
        "reason), refused or failed.",
        "outcome",
        "reason",
    )
    _arrivals = counter(
        "arrivals_total",
        "Samples announced to this instance, by state: committed, claimed, cancelled, expired.",
        "state",
        values=("committed", "claimed"),
    )
    refusals = counter("refusals_total", "Reservations refused as the receiver.", "reason")
    _bytes = counter(
        "bytes_total", "KV sent: copied while the sample decoded, or delta while it was paused.", "stage"
    )
    _stages = histogram(
        "stage_seconds",
        "Time to reserve, to copy while the sample decodes, and of its pause (stall).",
        _SECONDS,
        "stage",
    )
    _stall_steps = histogram("stall_steps", "Pause of a sample in engine steps of the donor.", _STEPS)
    resume_seconds = histogram(
        "resume_seconds",
        "Time from the receiver's commit to the end of its first step with the sample.",
        _SECONDS,
    )
    unclaimed = gauge("unclaimed_samples", "Arrived samples that no gateway has claimed.")

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        # A series that begins at 1 hides its first increase from rate().
        for outcome in ("moved", "handed_on"):
            self._moves.labels(outcome, "")
        for reason in Reason:
            self._moves.labels("failed", reason.name.lower())
        for stage in ("reserve", "copy", "stall"):
            self._stages.labels(stage)

    def moved(self, migration: pb.Migration) -> None:
        """Count a move that this instance made or attempted as the donor."""
        reason = Reason.of(migration.reason).name.lower() if migration.reason else ""
        moved = migration.outcome == pb.MOVE_OUTCOME_MOVED
        handed_on = moved and migration.by == pb.MOVE_BY_PREFIX
        self._moves.labels("handed_on" if handed_on else outcome_name(migration), reason).inc()
        if handed_on:
            return
        self._bytes.labels("copy").inc(migration.copied_bytes)
        self._bytes.labels("delta").inc(migration.delta_bytes)
        if not moved:
            return
        self._stages.labels("reserve").observe(seconds_of(migration.reserve_time))
        self._stages.labels("copy").observe(seconds_of(migration.copy_time))
        self._stages.labels("stall").observe(seconds_of(migration.stall_time))
        self._stall_steps.observe(migration.stall_steps)

    def arrived(self, state: ReceiverState) -> None:
        """Count an announced sample that reached a state."""
        self._arrivals.labels(state.name.lower()).inc()
