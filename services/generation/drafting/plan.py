"""Which offered tokens are verified in a step.

The plan of fixed length: each sample gets the offer that promises most, cut to the window and to what its
length limit leaves. An offer whose first token is unlikelier than `floor` is not worth a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.generation.drafting.drafter import Offer
from services.generation.engine.types import SampleState


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens to verify, and the drafter that offered them."""

    drafter: str
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class FixedPlan:
    """At most `window` tokens a sample and step; none where the best offer starts below `floor`."""

    window: int
    floor: float = 0.0

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
            best = max(
                ((name, offer) for name, made in offers.items() if (offer := made[i]) is not None),
                key=lambda pair: pair[1].expected,
                default=None,
            )
            if best is None or best[1].acceptance[0] < self.floor:
                continue
            tokens = list(best[1].tokens[: max(min(self.window, sample.room), 0)])
            if tokens:
                chosen[sample.sample_id] = Draft(best[0], tokens)
        return chosen
