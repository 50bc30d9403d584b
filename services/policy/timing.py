"""Which steps are measured: to learn from a step takes time, too. Pure.

Steps of a few milliseconds take about as long as the ones before them, and an engine waits while it is noted how
long. So short ones are measured now and then, and all of those that could tell something new.
"""

from __future__ import annotations

from dataclasses import dataclass

# All of the first steps are measured.
_AT_FIRST = 64
# Seconds of stepping for each measurement, which takes some hundredths of a millisecond.
_BETWEEN = 0.01


@dataclass(slots=True)
class Timing:
    """Is told of each step before it is done."""

    _measured: int = 0
    _drafted: bool = False
    _seconds: float = 0.0

    def due(self, seconds: float, *, drafted: bool) -> bool:
        """Whether a step is to be measured.

        Args:
            seconds: that it is predicted to take; 0 where nobody says.
            drafted: whether it verifies drafts.
        """
        self._seconds += seconds
        if (
            seconds > 0
            and self._seconds < _BETWEEN
            and drafted == self._drafted
            and self._measured >= _AT_FIRST
        ):
            return False
        self._measured += 1
        self._drafted, self._seconds = drafted, 0.0
        return True
