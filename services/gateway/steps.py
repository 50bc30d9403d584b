"""How long instances were idle within a step, and how much of it was there before it began. Pure.

The bubble of an instance is the time from the end of its last sample of a step to the end of the step's last
sample; where it had none, from the beginning. Times are unix seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from services.gateway.batch import Span


@dataclass(slots=True)
class StepReport:
    """A step that is over. `ends`: when the last sample of each instance ended. `tokens` of its samples;
    `pregenerated` tokens of these samples were there before, None where nothing was announced."""

    run_id: str
    step: int
    begun_at: float
    ended_at: float
    unfinished: int = 0
    ends: dict[str, float] = field(default_factory=dict)
    tokens: int = 0
    pregenerated: int | None = None

    def bubbles(self, serving: Iterable[str]) -> dict[str, float]:
        """Idle seconds of each instance that had samples of the step or could have had some."""
        names = {*self.ends, *serving}
        return {name: max(0.0, self.ended_at - self.ends.get(name, self.begun_at)) for name in names}


class StepBook:
    """The steps that are being worked on. Batches of the same step count as one while they overlap."""

    def __init__(self) -> None:
        self._steps: dict[tuple[str, int], StepReport] = {}

    def begin(
        self, run_id: str, step: int, samples: int, now: float, pregenerated: int | None = None
    ) -> None:
        """So many samples of a step are to be generated."""
        key = (run_id, step)
        report = self._steps.setdefault(key, StepReport(run_id, step, now, now))
        report.unfinished += samples
        if pregenerated is not None:
            report.pregenerated = pregenerated + (report.pregenerated or 0)
        self._close(key)

    def end(
        self, run_id: str, step: int, spans: Iterable[Span], tokens: int, now: float
    ) -> StepReport | None:
        """A sample has ended; the report if it was the step's last one."""
        report = self._steps.get((run_id, step))
        if report is None:
            return None
        for span in spans:
            if span.instance_id:
                report.ends[span.instance_id] = max(span.end, report.ends.get(span.instance_id, 0.0))
        report.tokens += tokens
        report.ended_at = max(report.ended_at, now)
        report.unfinished -= 1
        return self._close((run_id, step))

    def drop(self, run_id: str, step: int, samples: int) -> None:
        """Nobody works on so many samples any more."""
        report = self._steps.get((run_id, step))
        if report is not None:
            report.unfinished -= samples
            self._close((run_id, step))

    def _close(self, key: tuple[str, int]) -> StepReport | None:
        return self._steps.pop(key) if self._steps[key].unfinished <= 0 else None
