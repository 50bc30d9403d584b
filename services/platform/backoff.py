"""Exponential backoff: delays that double with each failure in a row. Pure: nothing here waits or reads a clock."""

from __future__ import annotations

# Keeps the power finite; the longest delay is reached long before.
_MAX_DOUBLINGS = 64


class ExponentialBackoff:
    """Delays of one peer or operation: `first` seconds after a failure, at most `longest` after many in a row."""

    def __init__(self, first: float, longest: float) -> None:
        self.failures = 0
        """Failures since the last success."""
        self._first = first
        self._longest = longest

    @property
    def delay(self) -> float:
        """Seconds to wait after the failures so far; 0 when there was none."""
        if not self.failures:
            return 0.0
        return min(self._longest, self._first * 2.0 ** min(self.failures - 1, _MAX_DOUBLINGS))

    def failed(self) -> float:
        """Count a failure and return the seconds to wait before the next attempt."""
        self.failures += 1
        return self.delay

    def succeeded(self) -> None:
        """Start over: the next failure costs the first delay again."""
        self.failures = 0
