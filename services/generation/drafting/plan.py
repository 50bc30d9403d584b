"""Which offered tokens are verified in a step.

The plan of fixed length: each sample gets the offer that promises most, cut to the window, to what its length
limit leaves, and to where it is still likely to be reached. An offer whose first token is unlikelier than `floor`
is not worth a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from services.generation.drafting.drafter import Offers
from services.generation.engine.types import SampleState

# Tokens that never survive stand for none.
NOTHING = float(np.finfo(np.float64).tiny)


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

    def choose(self, samples: Sequence[SampleState], offers: Mapping[str, Offers]) -> dict[str, Draft]:
        """The drafts of a step, by sample id; samples without one decode plainly.

        Args:
            samples: the samples that can verify a draft.
            offers: of each drafter that makes any.
        """
        if not (samples and offers):
            return {}
        survival = survivals(list(offers.values()), limits(samples, self.window), self.window)
        survival[survival[:, :, 0] < self.floor] = 0.0
        survival[survival < self.survival_floor] = 0.0
        picks = survival.sum(2).argmax(0)
        lengths = np.count_nonzero(survival[picks, np.arange(len(samples))], axis=1)
        return drafts(samples, offers, list(offers), picks, lengths)


def survivals(made: Sequence[Offers], limits: NDArray[np.int64], width: int) -> NDArray[np.float64]:
    """For each drafter, sample and position the probability to be reached and kept, [d, n, width]; 0: no token.

    `limits`, [n], are the most tokens that a sample can verify.
    """
    survival = np.zeros((len(made), len(limits), width))
    for offers, out in zip(made, survival, strict=True):
        offered = min(width, offers.acceptance.shape[1])
        np.multiply.accumulate(offers.acceptance[:, :offered], axis=1, out=out[:, :offered])
    if limits.min() < width:
        survival *= np.arange(width) < limits[:, None]
    return survival


def limits(samples: Sequence[SampleState], window: int) -> NDArray[np.int64]:
    """The most tokens that each sample can verify, [n]."""
    return np.minimum([sample.room for sample in samples], window)


def drafts(
    samples: Sequence[SampleState],
    offers: Mapping[str, Offers],
    names: Sequence[str],
    picks: NDArray[np.int64],
    lengths: NDArray[np.int64],
) -> dict[str, Draft]:
    """Beginnings of offers: for each sample the place of its drafter in `names`, and a number of tokens, [n]."""
    chosen: dict[str, Draft] = {}
    for pick, name in enumerate(names):
        made = offers[name]
        drafted = np.flatnonzero((picks == pick) & (lengths > 0))
        if not len(drafted):
            continue
        # All at once: a number taken from an array by itself takes as long as a dozen from a list.
        places = drafted.tolist()
        rows = zip(made.tokens[drafted].tolist(), lengths[drafted].tolist(), strict=True)
        tokens = [row[:length] for row, length in rows]
        sources = [made.sources[i] or name for i in places] if made.sources else repeat(name, len(places))
        whole = map(Draft._make, zip(repeat(name, len(places)), tokens, sources, strict=True))
        chosen.update(zip([samples[i].sample_id for i in places], whole, strict=True))
    return chosen


def context_of(samples: Sequence[SampleState]) -> int:
    """The samples' lengths together, in tokens."""
    return sum([len(sample.prompt) + len(sample.response) for sample in samples])
