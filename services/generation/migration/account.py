"""What a move took, as its donor tells it: stage times, the stall, and what became of the sample."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from paceline.internal.v1 import migration_pb2 as pb
from services.generation.migration.donor import Donor, Fate, Stage
from services.generation.migration.reason import Reason
from services.platform import tracing


@dataclass(slots=True)
class Account:
    """Fills in a report. Times are monotonic seconds."""

    report: pb.Migration
    began: float = field(default_factory=time.monotonic)
    # In the sample's trace, and the parent of what the receiver does with it.
    span: tracing.Span = field(default=tracing.NO_SPAN)
    _frozen_at: float = 0.0

    def frozen(self) -> None:
        """From now on the sample stands still."""
        self._frozen_at = time.monotonic()
        self.span.event("frozen")

    def resumed(self) -> None:
        """It decodes on, here or there; as far as is known until this is said again."""
        if self._frozen_at:
            self.report.stall_seconds = time.monotonic() - self._frozen_at

    def passed(self, stage: Stage, seconds: float) -> None:
        """A stage is over."""
        if stage is Stage.RESERVING:
            self.report.reserve_seconds = seconds
        elif stage is Stage.COPYING:
            self.report.copy_seconds = seconds
        elif stage is not Stage.RELEASING:
            # What is released here runs there already.
            self.resumed()

    def close(self, donor: Donor, step_seconds: float) -> None:
        """The move is over; a step of the donor takes so long."""
        report, moved = self.report, donor.fate is Fate.MOVED
        report.total_seconds = time.monotonic() - self.began
        report.stall_steps = report.stall_seconds / step_seconds if step_seconds > 0 else 0.0
        report.state = pb.MIGRATION_STATE_COMMITTED if moved else pb.MIGRATION_STATE_CANCELLED
        if moved:
            report.outcome = pb.MOVE_OUTCOME_MOVED
        else:
            report.outcome = pb.MOVE_OUTCOME_REFUSED if donor.refused else pb.MOVE_OUTCOME_FAILED
            report.reason = (donor.reason or Reason.INTERNAL).value
            report.message = donor.message
        self._end_span()

    def _end_span(self) -> None:
        report = self.report
        failed = report.outcome == pb.MOVE_OUTCOME_FAILED
        self.span.end(
            report.message if failed else "",
            outcome=pb.MoveOutcome.Name(report.outcome).removeprefix("MOVE_OUTCOME_").lower(),
            response_tokens=report.response_tokens,
            copied_bytes=report.copied_bytes,
            delta_bytes=report.delta_bytes,
            stall_seconds=report.stall_seconds,
        )
