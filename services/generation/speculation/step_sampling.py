"""Choose the steps whose time is measured, because learning from a step takes time as well. Pure.

Consecutive steps of a few milliseconds take about as long as each other, and the engine waits while the step-time
model is corrected. So short steps are sampled, and every step that may tell something new is measured.

The first plain step after several drafted ones is slower than those that follow, and the other way round: other
kernels, other memory. It is not measured, or plain decoding would look slow to a planner that only tries it now and
then. Where switches follow each other at every step, that slowness is what steps cost, and they are measured: else
a model that overestimates drafted steps would never be corrected.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# Steps at the start that are all measured.
_ALWAYS = 64
# Seconds of decoding per measurement, which itself takes some hundredths of a millisecond.
_INTERVAL = 0.01


@dataclass(slots=True)
class StepSampling:
    """Sampling of measured steps; it is told of each step before the step runs."""

    _measured: int = 0
    _seconds: float = 0.0
    # Kind of the last step, and the length of the sequence of steps of this kind that it ended.
    _drafted: bool = False
    _in_a_row: int = 0
    # The first step of this sequence was not measured.
    _skipped_first: bool = False
    # Kinds, drafted or not, whose last sequence was a single step.
    _single: set[bool] = field(default_factory=set)

    def record_unmeasured(self, *, drafted: bool) -> None:
        """Count a step that is not measured in any case."""
        if drafted != self._drafted:
            if self._in_a_row == 1:
                self._single.add(self._drafted)
            else:
                self._single.discard(self._drafted)
            self._in_a_row = 0
        self._in_a_row += 1
        self._drafted, self._skipped_first = drafted, False

    def should_measure(self, seconds: float, *, drafted: bool) -> bool:
        """Return True if the next step should be measured.

        Args:
            seconds: its predicted time; 0 if there is no prediction.
            drafted: it verifies drafts.
        """
        self._seconds += seconds
        before, skipped_first = self._in_a_row, self._skipped_first
        self.record_unmeasured(drafted=drafted)
        if self._in_a_row == 1 and before > 1 and drafted not in self._single:
            self._skipped_first = True
            return False
        if (
            seconds > 0
            and self._seconds < _INTERVAL
            and not skipped_first
            and self._in_a_row > 1
            and self._measured >= _ALWAYS
        ):
            return False
        self._measured += 1
        self._seconds = 0.0
        return True
