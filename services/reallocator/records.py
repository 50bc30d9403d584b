"""What the plan is made from, and what it says. Plain data."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from enum import StrEnum

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
    """What the plan goes by. Times in seconds.

    `least_gain`: of the pair's throughput, or (`level`) of the time until it is done, as a share. `payback`: a
    moved sample must save so many times what its stall costs. `stall_steps` and `seconds_per_token` are that cost:
    engine steps that it misses, and time to copy its KV. `spare_blocks`: share of the receiver's free blocks that
    stays free. `rest`: decisions for which an instance that gave takes nothing, and one that took gives nothing.
    """

    least_gain: float = 0.03
    level: bool = True
    least_level_gain: float = 0.1
    payback: float = 3.0
    stall_steps: float = 2.0
    seconds_per_token: float = 0.0
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
class Transfer:
    """Samples to be moved from one instance to another, in this order."""

    donor: str
    receiver: str
    keys: tuple[str, ...]
    rule: Rule
    predicted_gain: float
    reason: str


def expected_remaining(generated: int, limit: int) -> float:
    """Tokens that a sample with so many and at most `limit` goes on for: of heavy-tailed lengths the rest is
    expected to be as long as what there is."""
    return float(max(1, min(generated, limit - generated)))
