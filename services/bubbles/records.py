"""The vocabulary of the coordinator: runs, instances, leases, and what is said about them. Plain data.

Times are unix seconds.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Literal

from services.bubbles.pool import Item, StepPool

DuringUpdate = Literal["pregenerate", "halt", "sleep"]


class Phase(enum.Enum):
    """What the gateway is doing for a run."""

    ROLLOUT = "rollout"
    UPDATE = "update"
    APPLYING = "applying"


@dataclass(frozen=True, slots=True)
class Rules:
    """The settings of services.bubbles.config, as far as decisions depend on them. `intra_threshold`: most samples
    of a step beside which an instance pre-generates; None: only beside none at all."""

    during_update: DuringUpdate = "pregenerate"
    coupled: bool = True
    intra_threshold: int | None = None
    per_prompt: int | None = None
    lease_seconds: float = 30.0
    max_ahead: int = 2


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a run stands, as the gateway says. `step` is being rolled out, or was last; `waiting` of its
    `unfinished` samples have no instance."""

    phase: Phase
    policy_version: int
    step: int
    unfinished: int = 0
    waiting: int = 0


@dataclass(slots=True, eq=False)
class Run:
    """A run with its hinted steps. `ended_at`: when its step's last sample ended, 0 where that was not seen."""

    run_id: str
    heard_at: float
    standing: Standing | None = None
    ended_at: float = 0.0
    pools: dict[int, StepPool] = field(default_factory=dict)

    @property
    def leased(self) -> int:
        """Items that instances have."""
        return sum(pool.leased for pool in self.pools.values() if pool.wanted)

    def coming(self, most: int) -> list[StepPool]:
        """The pools of the next `most` hinted steps, nearest first."""
        steps = sorted(step for step, pool in self.pools.items() if pool.wanted)
        return [self.pools[step] for step in steps[:most]]


@dataclass(slots=True, eq=False)
class Lease:
    """An item of a run's step, given to an instance."""

    number: int
    run_id: str
    step: int
    item: Item
    revoked: bool = False

    @property
    def counts(self) -> bool:
        """Whether the item is this lease's; not so after the instance was silent for too long."""
        return self.item.lease == self.number


@dataclass(slots=True, eq=False)
class Instance:
    """An instance under its latest epoch. `told`: halt and sleep, as it was last told."""

    instance_id: str
    epoch: int
    seen_at: float
    leases: dict[int, Lease] = field(default_factory=dict)
    told: tuple[bool, bool] = (False, False)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a lease is. `finished`: ended by itself; `returned`: given back."""

    lease: int
    tokens: int = 0
    finished: bool = False
    returned: bool = False

    @property
    def runs(self) -> bool:
        """Whether it is still being generated."""
        return not (self.finished or self.returned)


@dataclass(frozen=True, slots=True)
class Poll:
    """What an instance says. `progress` is of leases of this coordinator only."""

    instance_id: str
    epoch: int
    policy_version: int
    room: int
    progress: tuple[Progress, ...] = ()
    serving: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """What an instance is told. `quiet`: nothing that it does not know already."""

    leases: tuple[Lease, ...] = ()
    revoked: tuple[int, ...] = ()
    halt: bool = False
    sleep: bool = False
    halted_at: float = 0.0
    quiet: bool = True
