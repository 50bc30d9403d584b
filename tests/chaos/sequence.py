"""Random sequences of kills and stalls: functions of a seed. Pure."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

SHORTEST_PAUSE, LONGEST_PAUSE = 0.1, 6.0
"""Seconds between two events: many at once, and now and then time to recover."""
SHORTEST_STALL, LONGEST_STALL = 0.05, 5.0
"""Seconds of a stall: from one that nobody notices to one that outlasts leases and registrations."""


class Kind(enum.StrEnum):
    """What happens to a process."""

    KILL = "kill"
    STALL = "stall"


@dataclass(frozen=True, slots=True)
class Event:
    """One kill or stall."""

    pause: float
    """Seconds since the event before it."""
    kind: Kind
    process: str
    seconds: float
    """How long a stall lasts. So long Redis stays dead, too: nothing but the agent starts it again."""

    def __str__(self) -> str:
        lasting = f" for {self.seconds:.2f} s" if self.kind is Kind.STALL else ""
        return f"after {self.pause:.2f} s {self.kind} {self.process}{lasting}"


def sequence(seed: int, count: int, processes: Sequence[str]) -> list[Event]:
    """Return the events of a seed. Of as many events as there are processes in a row, each process has one."""
    random, found, deck = Random(seed), [], list[str]()
    for _ in range(count):
        if not deck:
            deck = random.sample(processes, len(processes))
        pause = _between(random, SHORTEST_PAUSE, LONGEST_PAUSE)
        kind = random.choice(list(Kind))
        found.append(Event(pause, kind, deck.pop(), _between(random, SHORTEST_STALL, LONGEST_STALL)))
    return found


def _between(random: Random, least: float, most: float) -> float:
    """Draw from a distribution that has as much between 0.1 and 1 as between 1 and 10."""
    return math.exp(random.uniform(math.log(least), math.log(most)))
