"""Define the plan's input and output as plain data, and the price of a move. Pure; times in seconds.

A sample that moves by KV (RLHFSpec, section 6.2) pauses for some engine steps, and both engines spend a little
time on it. By prefix the receiver prefills the sample's tokens, in one step that stalls its whole batch. The time
to send grows far more slowly with the context than the time to prefill, so long contexts move by KV and short ones
by prefix; the length at which both cost the same depends on model and machine.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from services.reallocator.planning.throughput import ThroughputCurve


class MoveBy(StrEnum):
    """Form in which a sample moves from donor to receiver."""

    KV = "kv"
    PREFIX = "prefix"


@dataclass(frozen=True, slots=True)
class MoveCost:
    """Learned cost of moving one sample one way.

    `stall_steps`: engine steps that the sample misses. `seconds_per_token`: time to send one token of its context.
    `donor`, `receiver`: engine time that either side loses. `prefill`: factor on the predicted time for which the
    receiver prefills the context; 0 for a way without prefill.
    """

    stall_steps: float = 2.0
    seconds_per_token: float = 0.0
    donor: float = 0.0
    receiver: float = 0.0
    prefill: float = 0.0


@dataclass(frozen=True, slots=True)
class MovePrice:
    """Predicted seconds that one move costs: the sample's stall, and engine time of both sides.

    `prefill` is the part of the stall, and of the receiver's time, that was predicted from the context.
    """

    by: MoveBy
    stall: float
    donor: float
    receiver: float
    prefill: float

    def sample_seconds(self, donor_samples: int, receiver_samples: int) -> float:
        """Return the time that all samples of both sides lose together."""
        return self.stall + self.donor * donor_samples + self.receiver * receiver_samples


def price(by: MoveBy, cost: MoveCost, tokens: int, there: ThroughputCurve, samples: int) -> MovePrice:
    """Return the price of moving `tokens` tokens to an instance that will then have `samples` samples."""
    prefill = cost.prefill * there.prefill_seconds(tokens) if cost.prefill else 0.0
    stall = cost.stall_steps * there.step_seconds(samples) + cost.seconds_per_token * tokens + prefill
    return MovePrice(by, stall, cost.donor, cost.receiver + prefill, prefill)


def cheapest(
    ways: Mapping[MoveBy, MoveCost],
    tokens: int,
    there: ThroughputCurve,
    donor_samples: int,
    receiver_samples: int,
) -> MovePrice:
    """Return the price of the cheapest way, KV among equals. ValueError when there is no way."""
    prices = [price(by, cost, tokens, there, receiver_samples) for by, cost in ways.items()]
    return min(
        prices,
        key=lambda each: (each.sample_seconds(donor_samples, receiver_samples), each.by is not MoveBy.KV),
    )


def lost(prices: Iterable[MovePrice]) -> tuple[float, float]:
    """Return the engine time that the donor and the receiver lose by these moves."""
    donor = receiver = 0.0
    for each in prices:
        donor += each.donor
        receiver += each.receiver
    return donor, receiver


class Rule(StrEnum):
    """Rule by which samples are moved; a label of metrics."""

    # Moves samples from above the saturation point to below it (RLHFSpec, section 6.1).
    THRESHOLD = "threshold"
    # Balances instances in the long tail of a step, where the threshold rule finds nothing: they finish sooner.
    BALANCE = "balance"
    # Empties the donor.
    EVACUATE = "evacuate"


@dataclass(frozen=True, slots=True)
class ReallocationRules:
    """Settings of the plan, and learned costs.

    `least_gain`: relative gain of the pair's throughput that pays, net of the moves' cost. `balance`: whether the
    balance rule is on; `least_balance_gain`: relative gain of the time until the pair finishes.
    `least_saved_seconds`: time by which the pair must finish sooner, by any rule. `payback`: a moved sample must
    save this many times its stall. `ways`: cost of each allowed way to move. `trust`: share of its predicted gain
    that a rule has achieved. `spare_blocks`: share of the receiver's free KV blocks that stays free.
    `cooldown_decisions`: decisions in which a former donor takes nothing and a former receiver gives nothing.
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
    """Instance by its status alone: its samples, the curve and threshold of its kind, and `peers` as in a view."""

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

    `tokens` is the number of tokens with KV; `prefill` is the predicted time to prefill them, 0 by KV.
    """

    key: str
    by: MoveBy = MoveBy.KV
    tokens: int = 1
    prefill: float = 0.0


@dataclass(frozen=True, slots=True)
class Transfer:
    """Samples to be moved from one instance to another, in this order.

    `predicted_gain` is net of the moves' cost, in the terms of its rule; `rate_gain` is the relative gain of the
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
        """Return the number of samples that move this way."""
        return sum(move.by is by for move in self.moves)
