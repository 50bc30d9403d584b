"""What it costs to move one sample, by its KV or by its prefix. Pure; times in seconds.

By KV (RLHFSpec, section 6.2) the sample stands still for some engine steps, and both sides spend a little
time on it besides. By prefix the receiver reads the sample's tokens again, in one step that all of its
samples wait for. Sending grows with the context far more slowly than reading does, so long contexts go by KV
and short ones by prefix; where they part is a matter of model and machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from services.reallocator.threshold import Curve


class By(StrEnum):
    """What goes from donor to receiver."""

    KV = "kv"
    PREFIX = "prefix"


@dataclass(frozen=True, slots=True)
class WayCost:
    """What a move of one way has been found to cost.

    `stall_steps`: engine steps that the sample misses. `seconds_per_token`: of sending, for each token of its
    context. `donor` and `receiver`: engine time that either side loses by it. `reading`: times the predicted time
    for which the receiver reads the context; 0 for what is not read again.
    """

    stall_steps: float = 2.0
    seconds_per_token: float = 0.0
    donor: float = 0.0
    receiver: float = 0.0
    reading: float = 0.0


@dataclass(frozen=True, slots=True)
class Price:
    """Of one move: for how long the sample stands still, and engine time of both sides; `reading` is the part
    of the receiver's that was predicted from the context."""

    by: By
    stall: float
    donor: float
    receiver: float
    reading: float

    def sample_seconds(self, donor_samples: int, receiver_samples: int) -> float:
        """What all samples of both sides together lose."""
        return self.stall + self.donor * donor_samples + self.receiver * receiver_samples


def price(by: By, cost: WayCost, tokens: int, there: Curve, samples: int) -> Price:
    """Of moving a sample of so many tokens to an instance that will then have so many samples."""
    reading = cost.reading * there.reading_seconds(tokens) if cost.reading else 0.0
    stall = cost.stall_steps * there.step_seconds(samples) + cost.seconds_per_token * tokens + reading
    return Price(by, stall, cost.donor, cost.receiver + reading, reading)


def cheapest(
    ways: Mapping[By, WayCost], tokens: int, there: Curve, donor_samples: int, receiver_samples: int
) -> Price:
    """The way that costs all samples of both sides least; of equals by KV. ValueError when there is no way."""
    prices = [price(by, cost, tokens, there, receiver_samples) for by, cost in ways.items()]
    return min(
        prices,
        key=lambda each: (each.sample_seconds(donor_samples, receiver_samples), each.by is not By.KV),
    )


def lost(prices: Iterable[Price]) -> tuple[float, float]:
    """Engine time that the donor and the receiver lose by these moves."""
    donor = receiver = 0.0
    for each in prices:
        donor += each.donor
        receiver += each.receiver
    return donor, receiver
