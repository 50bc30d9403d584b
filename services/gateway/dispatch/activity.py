"""Curve of how many samples an instance had over a step, in a bounded number of bins. Pure."""

from __future__ import annotations

from itertools import accumulate

BINS = 64
"""Most bins of a curve."""
_FIRST_WIDTH = 1 / 64


class ActivityCurve:
    """Samples of an instance over time, from `begin` in unix seconds on.

    A span costs O(1), whatever its length. When time runs out of the last bin, all bins become twice as wide, so a
    curve has at least half as many bins as it may have; spans that are shorter than a bin may then vanish.
    """

    def __init__(self, begin: float) -> None:
        self.begin = begin
        self.width = _FIRST_WIDTH
        # By bin, how many samples more there are from it on than before it.
        self._changes = [0] * BINS

    def add(self, begin: float, end: float) -> None:
        """Count a sample that was there between two times, in unix seconds."""
        while end - self.begin > self.width * BINS:
            self.widen()
        self._changes[self._bin(begin)] += 1
        last = self._bin(end) + 1
        if last < BINS:
            self._changes[last] -= 1

    def widen(self) -> None:
        """Make bins twice as wide."""
        pairs = zip(self._changes[::2], self._changes[1::2], strict=True)
        self._changes = [one + other for one, other in pairs] + [0] * (BINS // 2)
        self.width *= 2

    def counts(self, end: float) -> list[int]:
        """Return the number of samples in each bin up to a time, in unix seconds."""
        return list(accumulate(self._changes))[: self._bin(end) + 1]

    def _bin(self, time: float) -> int:
        return min(BINS - 1, max(0, int((time - self.begin) / self.width)))
