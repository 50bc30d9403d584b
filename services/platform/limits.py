"""How often a caller may call: a token bucket. Pure: times come from the caller."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rate:
    """Calls a second in the long run, and how many may come at once."""

    per_second: float
    burst: float


class Bucket:
    """Full at first; refills at the rate up to the burst; a call takes one out."""

    def __init__(self, rate: Rate, now: float) -> None:
        """`now` is in seconds, monotonic."""
        self.rate = rate
        self._level = rate.burst
        self._at = now

    def take(self, now: float) -> float:
        """0 when the call is let through; else the seconds until one will be. A refused call costs nothing."""
        self._level = min(self.rate.burst, self._level + max(0.0, now - self._at) * self.rate.per_second)
        self._at = max(self._at, now)
        if self._level >= 1.0:
            self._level -= 1.0
            return 0.0
        return (1.0 - self._level) / self.rate.per_second
