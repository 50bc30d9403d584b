"""Input and output of the plan, as plain data."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from services.reallocator.planning.price import MoveBy, MoveCost
from services.reallocator.planning.throughput import ThroughputCurve


class Rule(StrEnum):
    """Rule by which samples are moved; a label of metrics."""

    # From above the saturation point to below it (RLHFSpec, section 6.1).
    THRESHOLD = "threshold"
    # In the long tail of a step, where the threshold rule finds nothing: balanced instances finish sooner.
    BALANCE = "balance"
    # The donor has to become empty.
    EVACUATE = "evacuate"


@dataclass(frozen=True, slots=True)
class ReallocationRules:
    """Settings of the plan, and learned costs.

    `least_gain`: relative gain of the pair's throughput that pays, net of the moves' cost. `balance`: whether the
    balance rule is on; `least_balance_gain`: relative gain of the time until the pair finishes.
    `least_saved_seconds`: time by which the pair must finish sooner, by any rule. `payback`: a moved sample must
    save this many times its stall. `ways`: cost of each allowed way to move. `trust`: share of its predicted gain
    that a rule has achieved. `spare_blocks`: share of the receiver's free KV blocks that stays free.
    `cooldown_decisions`: decisions in which an instance that gave takes nothing, and one that took gives nothing.
    """

    least_gain: float = 0.03
    balance: bool = True
    least_balance_gain: float = 0.1
    least_saved_seconds: float = 0.0
    payback: float = 3.0
    ways: Mapping[MoveBy, MoveCost] = field(default_factory=lambda: {MoveBy.KV: MoveCost()})
    trust: Mapping[Rule, float] = field(default_factory=dict)
    spare_blocks: float = 0.1
    cooldown_decisions: int = 2


@dataclass(frozen=True, slots=True)
class Candidate:
    """Running sample that a plan could move.

    `tokens` have KV; `accepted` is its mean number of accepted draft tokens per step; `remaining` is the expected
    number of tokens until it ends; `blocks` is its number of KV blocks.
    """

    key: str
    tokens: int
    accepted: float = 0.0
    remaining: float = 0.0
    blocks: int = 0
    movable: bool = True


@dataclass(frozen=True, slots=True)
class LoadView:
    """Instance by its status alone: its samples, and the curve and threshold of its kind. `peers` as in a view."""

    instance_id: str
    samples: int
    curve: ThroughputCurve
    threshold: int
    peers: Hashable = None


@dataclass(frozen=True, slots=True)
class InstanceView:
    """Instance as the plan sees it.

    `samples` run or wait on it; `room` more could run; `threshold` is its saturation point in samples. Samples move
    only among instances with equal `peers`. `gives` and `receives` say whether it may be donor or receiver now.
    """

    instance_id: str
    samples: int
    room: int
    free_blocks: int
    curve: ThroughputCurve
    threshold: int
    candidates: tuple[Candidate, ...] = ()
    peers: Hashable = None
    gives: bool = True
    receives: bool = True


@dataclass(frozen=True, slots=True)
class Move:
    """Move of one sample with its KV, or by its prefix, which the receiver prefills.

    `tokens` are those with KV; `prefill` is the predicted time of that prefill in seconds, 0 by KV.
    """

    key: str
    by: MoveBy = MoveBy.KV
    tokens: int = 1
    prefill: float = 0.0


@dataclass(frozen=True, slots=True)
class Transfer:
    """Samples to be moved from one instance to another, in this order.

    `predicted_gain` is net of the moves' cost and means what its rule says; `rate_gain` is the relative gain of the
    pair's tokens per second before costs, which is measured afterwards.
    """

    donor: str
    receiver: str
    moves: tuple[Move, ...]
    rule: Rule
    predicted_gain: float
    reason: str
    rate_gain: float = 0.0

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the keys of the samples."""
        return tuple(move.key for move in self.moves)

    def count(self, by: MoveBy) -> int:
        """Return how many samples move this way."""
        return sum(move.by is by for move in self.moves)
