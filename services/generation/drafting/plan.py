"""Which offered tokens are verified in a step.

The plan of fixed length: each sample gets the offer that promises most, cut to the window, to what its length
limit leaves, and to where it is still likely to be reached. An offer whose first token is unlikelier than `floor`
is not worth a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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


@dataclass(slots=True, eq=False)
class Drafts(Mapping[str, Draft]):
    """The drafts of a step, by sample id; samples without one decode plainly."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    origins: dict[str, tuple[str, str]] = field(default_factory=dict)
    """The drafter of each, and what results call their origin."""
    expected: float = 0.0
    """Tokens that the drafters predict to be accepted, of all together."""

    @property
    def count(self) -> int:
        """Tokens of all together."""
        return sum(map(len, self.tokens.values()))

    def __getitem__(self, sample_id: str) -> Draft:
        drafter, source = self.origins[sample_id]
        return Draft(drafter, self.tokens[sample_id], source)

    def __iter__(self) -> Iterator[str]:
        return iter(self.tokens)

    def __len__(self) -> int:
        return len(self.tokens)


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

    def rest(self, samples: Sequence[SampleState]) -> None:
        """Nothing: it remembers no steps."""

    def choose(self, samples: Sequence[SampleState], offers: Mapping[str, Offers]) -> Drafts:
        """The drafts of a step.

        Args:
            samples: the samples that can verify a draft.
            offers: of each drafter that makes any.
        """
        if not (samples and offers):
            return Drafts()
        survival = survivals(list(offers.values()), limits(samples, self.window), self.window)
        survival[survival[:, :, 0] < self.floor] = 0.0
        survival[survival < self.survival_floor] = 0.0
        picks = survival.sum(2).argmax(0)
        picked = survival[picks, np.arange(len(samples))]
        lengths = np.count_nonzero(picked, axis=1)
        return drafts(samples, offers, list(offers), picks, lengths, float(picked.sum()))


def survivals(made: Sequence[Offers], limits: NDArray[np.int64], width: int) -> NDArray[np.float64]:
    """For each drafter, sample and position the probability to be reached and kept, [d, n, width]; 0: no token.

    `limits`, [n], are the most tokens that a sample can verify.
    """
    # Positions first, so that what is multiplied lies side by side.
    survival = np.zeros((width, len(made), len(limits)))
    for i, offers in enumerate(made):
        offered = min(width, offers.acceptance.shape[1])
        survival[:offered, i] = offers.acceptance[:, :offered].T
    for position in range(1, width):
        survival[position] *= survival[position - 1]
    if limits.min() < width:
        survival *= (np.arange(width)[:, None] < limits)[:, None]
    return np.ascontiguousarray(survival.transpose(1, 2, 0))


def limits(samples: Sequence[SampleState], window: int) -> NDArray[np.int64]:
    """The most tokens that each sample can verify, [n]."""
    return np.minimum([sample.room for sample in samples], window)


def drafts(
    samples: Sequence[SampleState],
    offers: Mapping[str, Offers],
    names: Sequence[str],
    picks: NDArray[np.int64],
    lengths: NDArray[np.int64],
    expected: float,
) -> Drafts:
    """Beginnings of offers: for each sample the place of its drafter in `names`, and a number of tokens, [n]."""
    drafted = np.flatnonzero(lengths)
    if not len(drafted):
        return Drafts()
    counts, width = lengths[drafted], int(lengths.max())
    offered = np.zeros((len(names), len(samples), width), np.int32)
    for pick, name in enumerate(names):
        tokens = offers[name].tokens[:, :width]
        offered[pick, :, : tokens.shape[1]] = tokens
    # All at once: a number taken from an array by itself takes as long as a dozen from a list.
    flat = offered[picks[drafted], drafted][np.arange(width) < counts[:, None]].tolist()
    ends, places = np.cumsum(counts).tolist(), drafted.tolist()
    ids = [samples[i].sample_id for i in places]
    tokens_of = [flat[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    own = [(name, name) for name in names]
    sources = [offers[name].sources for name in names]
    origins = [
        (names[pick], sources[pick][i] or names[pick]) if sources[pick] else own[pick]
        for i, pick in zip(places, picks[drafted].tolist(), strict=True)
    ]
    return Drafts(dict(zip(ids, tokens_of, strict=True)), dict(zip(ids, origins, strict=True)), expected)


def context_of(samples: Sequence[SampleState]) -> int:
    """The samples' lengths together, in tokens."""
    return sum([len(sample.prompt) + len(sample.response) for sample in samples])
