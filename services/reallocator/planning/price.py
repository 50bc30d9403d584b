"""Price a move of one sample, by its KV or by its prefix. Pure; times in seconds.

By KV (RLHFSpec, section 6.2) the sample pauses for some engine steps, and both engines spend a little time on it.
By prefix the receiver prefills the sample's tokens, in one step that stalls its whole batch. The time to send
grows far more slowly with the context than the time to prefill, so long contexts move by KV and short ones by
prefix; the length at which both cost the same depends on model and machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from services.reallocator.planning.throughput import ThroughputCurve


class MoveBy(StrEnum):
    """Form in which a sample goes from donor to receiver."""

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
