"""Which offered tokens are verified in a step.

The plan of fixed length: each sample gets the offer that promises most, cut to the window, to what its length
limit leaves, and to where it is still likely to be reached. An offer whose first token is unlikelier than `floor`
is not worth a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from services.generation.drafting.drafter import Offer
from services.generation.engine.types import SampleState


class Draft(NamedTuple):
    """Tokens to verify, the drafter that offered them, and what results call their origin."""

    drafter: str
    tokens: list[int]
    source: str


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step's time depends on: samples, rows (they and their draft tokens), and tokens in their contexts."""

    requests: int
    rows: int
    context: int


@dataclass(frozen=True, slots=True)
class FixedPlan:
    """At most `window` tokens a sample and step; none where the best offer starts below `floor`.

    Tokens are left out from the first one that is reached and kept with a probability below `survival_floor`.
    """

    window: int
    floor: float = 0.0
    survival_floor: float = 0.0

    measures = False
    """Whether `stepped` wants to know."""

    def stepped(self, shape: StepShape, seconds: float) -> None:
        """Nothing: how long steps take does not matter to it."""

    def choose(
        self, samples: Sequence[SampleState], offers: Mapping[str, Sequence[Offer | None]]
    ) -> dict[str, Draft]:
        """The drafts of a step, by sample id; samples without one decode plainly.

        Args:
            samples: the samples that can verify a draft.
            offers: for each drafter, one offer or None per sample.
        """
        chosen: dict[str, Draft] = {}
        for i, sample in enumerate(samples):
            limit = min(self.window, sample.room)
            best: Draft | None = None
            most = 0.0
            for name, made in offers.items():
                offer = made[i]
                if offer is None or offer.acceptance[0] < self.floor:
                    continue
                length, expected = worth(offer.acceptance, limit, self.survival_floor)
                if length and (best is None or expected > most):
                    best = Draft(name, list(offer.tokens[:length]), offer.source or name)
                    most = expected
            if best is not None:
                chosen[sample.sample_id] = best
        return chosen


def context_of(samples: Sequence[SampleState]) -> int:
    """The samples' lengths together, in tokens."""
    return sum([len(sample.prompt) + len(sample.response) for sample in samples])


def worth(acceptance: Sequence[float], limit: int, survival_floor: float) -> tuple[int, float]:
    """How many tokens of an offer to verify, at most `limit`, and how many of them will be kept on average."""
    expected, survival = 0.0, 1.0
    for length, probability in enumerate(acceptance[: max(limit, 0)]):
        survival *= probability
        if survival < survival_floor:
            return length, expected
        expected += survival
    return min(len(acceptance), max(limit, 0)), expected
