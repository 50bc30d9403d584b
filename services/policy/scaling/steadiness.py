"""When a recommendation is followed: not at every turn that the demand takes. Pure.

More instances are taken when more were recommended all through a while (as few as at any moment of it), fewer when
fewer were all through a longer while (as many as at any moment of it). Small changes are passed over, and after a
change there is a pause.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds, and the share of the replicas that a change must be above."""

    up: float = 15.0
    down: float = 300.0
    cooldown: float = 60.0
    tolerance: float = 0.1


class Steady:
    """One pool. Times are in seconds, monotonic."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._seen: deque[tuple[float, int]] = deque()
        self._began: float | None = None
        self._changed_at = float("-inf")
        self._last: int | None = None
        self._target = 0

    def next(self, current: int, recommended: int, now: float) -> int:
        """The replicas to have, given those there are (as they are meant to be) and a recommendation.

        A change may be carried out one replica at a time: that is one change, and the pause comes after it.
        """
        self._remember(recommended, now)
        self._notice(current, now)
        moving = current != self._target
        if not moving and now - self._changed_at < self._patience.cooldown:
            return current
        wanted = self._wanted(current, now)
        if not moving and abs(wanted - current) < self._patience.tolerance * current:
            wanted = current
        if moving and wanted == current:
            # Broken off half-way, which is a change, too.
            self._changed_at = now
        self._target = wanted
        return wanted

    def _remember(self, recommended: int, now: float) -> None:
        self._began = now if self._began is None else self._began
        self._seen.append((now, recommended))
        horizon = now - max(self._patience.up, self._patience.down)
        # The last one before the horizon was in force at the horizon.
        while len(self._seen) > 1 and self._seen[1][0] <= horizon:
            self._seen.popleft()

    def _notice(self, current: int, now: float) -> None:
        """Takes in what has become of the replicas since the last time, on our advice or not."""
        last, self._last = self._last, current
        if last is None:
            self._target = current
        elif current != last:
            on_the_way = min(last, self._target) <= current <= max(last, self._target)
            if not on_the_way:
                self._target = current
            if current == self._target:
                self._changed_at = now

    def _wanted(self, current: int, now: float) -> int:
        assert self._began is not None
        if now - self._began >= self._patience.up:
            least = min(self._within(now - self._patience.up))
            if least > current:
                return least
        if now - self._began >= self._patience.down:
            most = max(self._within(now - self._patience.down))
            if most < current:
                return most
        return current

    def _within(self, since: float) -> list[int]:
        """What was recommended from then on, including what was in force then."""
        values = [value for at, value in self._seen if at > since]
        before = [value for at, value in self._seen if at <= since]
        return [*before[-1:], *values]
