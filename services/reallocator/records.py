"""What the plan is made from, and what it says. Plain data."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from services.reallocator.price import By, WayCost
from services.reallocator.threshold import Curve


class Rule(StrEnum):
    """Why samples are moved."""

    # From above the turning point of throughput to below it (RLHFSpec, section 6.1).
    THRESHOLD = "threshold"
    # No instance can be helped so, and levelling out ends the work sooner: the long tail of a step.
    LEVEL = "level"
    # The donor is to become empty.
    EVACUATE = "evacuate"


@dataclass(frozen=True, slots=True)
class Rules:
    """What the plan goes by.

    `least_gain`: of the pair's throughput, or (`level`) of the time until it is done, as a share, what the
    moves cost taken off. `payback`: a moved sample must save so many times what its stall costs. `ways`: what
    each way to move a sample costs; one that is not there is not taken. `trust`: what share of its predicted
    gain a rule has brought. `spare_blocks`: share of the receiver's free blocks that stays free. `rest`:
    decisions for which an instance that gave takes nothing, and one that took gives nothing.
    """

    least_gain: float = 0.03
    level: bool = True
    least_level_gain: float = 0.1
    payback: float = 3.0
    ways: Mapping[By, WayCost] = field(default_factory=lambda: {By.KV: WayCost()})
    trust: Mapping[Rule, float] = field(default_factory=dict)
    spare_blocks: float = 0.1
    rest: int = 2


@dataclass(frozen=True, slots=True)
class Candidate:
    """A running sample. `tokens` are those with KV, `accepted` its mean accepted draft tokens a step, `remaining`
    the tokens that it is expected to go on for."""

    key: str
    tokens: int
    accepted: float = 0.0
    remaining: float = 0.0
    blocks: int = 0
    movable: bool = True


@dataclass(frozen=True, slots=True)
class Standing:
    """An instance. `samples` run or wait on it, `room` more could run. Samples move among equal `peers` only."""

    instance_id: str
    samples: int
    room: int
    free_blocks: int
    curve: Curve
    threshold: int
    candidates: tuple[Candidate, ...] = ()
    peers: Hashable = None
    gives: bool = True
    receives: bool = True


@dataclass(frozen=True, slots=True)
class Move:
    """One sample, and what of it goes over: with its KV, or by its prefix, from which the receiver makes it anew.

    `reading`: seconds that the receiver is predicted to read for.
    """

    key: str
    by: By = By.KV
    tokens: int = 1
    reading: float = 0.0


@dataclass(frozen=True, slots=True)
class Transfer:
    """Samples to be moved from one instance to another, in this order. `predicted_gain` is what is left of it when
    the moves are paid; `rate_gain` is that of the pair's tokens a second, before that."""

    donor: str
    receiver: str
    moves: tuple[Move, ...]
    rule: Rule
    predicted_gain: float
    reason: str
    rate_gain: float = 0.0

    @property
    def keys(self) -> tuple[str, ...]:
        """Of the samples."""
        return tuple(move.key for move in self.moves)

    def count(self, by: By) -> int:
        """How many go this way."""
        return sum(move.by is by for move in self.moves)
