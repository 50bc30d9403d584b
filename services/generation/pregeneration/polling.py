"""When the coordinator is asked, and for how much. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from services.generation.pregeneration.stream import Standing


@dataclass(frozen=True, slots=True)
class Situation:
    """The instance as the poller sees it: items that are being generated, whether one has ended that the
    coordinator does not know of, and whether it is time to report."""

    standing: Standing
    running: int
    news: bool
    due: bool

    @property
    def calls_for_poll(self) -> bool:
        """Whether there is something to tell, or more that could be done.

        Beside real work nothing is asked for, but what it interrupted is given back for others to go on with.
        """
        return self.news or (self.standing.free and (self.due or not self.running))

    def room(self, seats: int, reserved: int) -> int:
        """Items that could be started now, of `seats` samples that run at once; `reserved` are for real ones."""
        return max(0, seats - reserved - self.running) if self.standing.free else 0


def pause(failures: int, shortest: float, longest: float) -> float:
    """Seconds to wait after so many failures in a row, at least one."""
    return min(longest, shortest * 2.0 ** min(failures - 1, 32))
