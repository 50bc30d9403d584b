"""Report of one move, as the donor fills it in: times of its stages, the stall, and its outcome."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from paceline.internal.v1 import migration_pb2 as pb
from paceline.times import duration, seconds_of
from services.generation.kv_transfer.reason import Reason
from services.generation.migration.donor import Donor, Fate, Stage
from services.platform.observability.span import NO_SPAN, TraceSpan


@dataclass(slots=True)
class MoveReport:
    """Recorder of a move. Times are monotonic seconds; `span` is part of the sample's trace."""

    message: pb.Migration
    began: float = field(default_factory=time.monotonic)
    span: TraceSpan = field(default=NO_SPAN)
    _paused_at: float = 0.0

    def paused(self) -> None:
        """Start the stall."""
        self._paused_at = time.monotonic()
        self.span.event("paused")

    def resumed(self) -> None:
        """End the stall: the sample decodes again, here or there. The last call counts."""
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
        """Record the outcome; a step of the donor takes `step_seconds`."""
        message, moved = self.message, donor.fate is Fate.MOVED
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
    """Fill in the report of a move that was not begun."""
    message.state, message.outcome = pb.MIGRATION_STATE_CANCELLED, pb.MOVE_OUTCOME_REFUSED
    message.reason, message.message = reason.value, text
    return message
