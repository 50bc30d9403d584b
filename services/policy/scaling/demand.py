"""What there is to do and who is idle, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class State(StrEnum):
    """Of an instance, as far as scaling cares."""

    SERVING = "serving"
    STALE = "stale"
    PAUSED = "paused"
    DRAINING = "draining"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class InstanceDemand:
    """One instance. `running` samples of a step of the `capacity` that it runs at once; `tokens` since its process,
    the one of this epoch, started."""

    instance_id: str
    epoch: int
    state: State
    running: int
    capacity: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Due:
    """Tokens that are wanted within `seconds` from now; these may be negative."""

    seconds: float
    tokens: float


@dataclass(frozen=True, slots=True)
class Demand:
    """Tokens are predicted ones that samples still need."""

    waiting_samples: int = 0
    waiting_tokens: float = 0.0
    running_samples: int = 0
    running_tokens: float = 0.0
    dues: tuple[Due, ...] = ()
    instances: tuple[InstanceDemand, ...] = field(default_factory=tuple)

    @property
    def samples(self) -> int:
        """Samples that are unfinished."""
        return self.waiting_samples + self.running_samples

    @property
    def tokens(self) -> float:
        """Tokens that these need."""
        return self.waiting_tokens + self.running_tokens


def ordinal(instance_id: str, pool: str) -> int | None:
    """The number of an instance in a pool, whose instances are called <pool>-<number>; None for another's."""
    name, _, number = instance_id.rpartition("-")
    return int(number) if name == pool and number.isdecimal() else None
