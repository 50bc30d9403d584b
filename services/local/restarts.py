"""When a process that died is started again. Pure: times come from the caller."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Restarts with growing delays, and not for ever."""

    limit: int = 5
    """Restarts of one process within the window; after that it stays dead."""
    window: float = 300.0
    """Seconds after which a death is forgotten."""
    initial: float = 0.5
    """Seconds before the first restart."""
    multiplier: float = 2.0
    maximum: float = 30.0


class Restarts:
    """The deaths of one process, and what follows from them."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._deaths: list[float] = []

    def died(self, now: float) -> float | None:
        """Notes a death at `now` (seconds, monotonic). Returns when to restart; None for never again."""
        policy = self._policy
        self._deaths = [death for death in self._deaths if now - death < policy.window] + [now]
        count = len(self._deaths)
        if count > policy.limit:
            return None
        return now + min(policy.maximum, policy.initial * policy.multiplier ** (count - 1))
