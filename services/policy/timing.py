"""Which steps are measured: to learn from a step takes time, too. Pure.

Steps of a few milliseconds take about as long as the ones before them, and an engine waits while it is noted how
long. So short ones are measured now and then, and all of those that could tell something new.

A plain step after many with drafts takes longer than the plain steps after it, and the other way round: other
kernels, other memory. The first of a run is therefore not measured, or plain decoding would seem slow to whoever
only tries it now and then; but where runs are a single step long, that is what steps take. To measure none of them
would be worse: drafts that are priced too high are followed by rests each time, and would stay priced too high.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# All of the first steps are measured.
_AT_FIRST = 64
# Seconds of stepping for each measurement, which takes some hundredths of a millisecond.
_BETWEEN = 0.01


@dataclass(slots=True)
class Timing:
    """Is told of each step before it is done."""

    _measured: int = 0
    _seconds: float = 0.0
    # Of the last step, and of how many such in a row it was the last.
    _drafted: bool = False
    _run: int = 0
    # Whether the first of this run was left out.
    _left_out: bool = False
    # Kinds, drafted or not, whose last run was a single step.
    _single: set[bool] = field(default_factory=set)

    def passed(self, *, drafted: bool) -> None:
        """A step that nobody measures."""
        if drafted != self._drafted:
            if self._run == 1:
                self._single.add(self._drafted)
            else:
                self._single.discard(self._drafted)
            self._run = 0
        self._run += 1
        self._drafted, self._left_out = drafted, False

    def due(self, seconds: float, *, drafted: bool) -> bool:
        """Whether a step is to be measured.

        Args:
            seconds: that it is predicted to take; 0 where nobody says.
            drafted: whether it verifies drafts.
        """
        self._seconds += seconds
        before, left_out = self._run, self._left_out
        self.passed(drafted=drafted)
        if self._run == 1 and before > 1 and drafted not in self._single:
            self._left_out = True
            return False
        if (
            seconds > 0
            and self._seconds < _BETWEEN
            and not left_out
            and self._run > 1
            and self._measured >= _AT_FIRST
        ):
            return False
        self._measured += 1
        self._seconds = 0.0
        return True
