"""Which offered tokens are verified in a step.

The plan of fixed length: each sample gets the offer that promises most, cut to the window, to what its length
limit leaves, and to where it is still likely to be reached. An offer whose first token is unlikelier than `floor`
is not worth a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from services.generation.drafting.drafter import Offers
from services.generation.drafting.selection import longest, survivals
from services.generation.engine.types import SampleState

UNBOUNDED = 1 << 30
"""Rows that no step has."""
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
    saved: float = inf
    """Seconds that the step is predicted to save over plain decoding of as many tokens; infinite: nobody says."""

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
    Drafts are cut to equal lengths where the step would have more rows than it may.
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

    def rest_on(self) -> None:
        """Nothing."""

    def choose(
        self, samples: Sequence[SampleState], offers: Mapping[str, Offers], rows: int = UNBOUNDED
    ) -> Drafts:
        """The drafts of a step.

        Args:
            samples: the samples that can verify a draft.
            offers: of each drafter that makes any.
            rows: that these samples and their draft tokens may have together, at most.
        """
        if not (samples and offers):
            return Drafts()
        survival = survivals(list(offers.values()), rooms(samples), self.window)
        chosen = longest(survival, self.floor, self.survival_floor)
        width, room = int(chosen.lengths.max()), max(0, rows - len(samples))
        while chosen.lengths.sum() > room:
            width -= 1
            if not width:
                return Drafts()
            chosen = longest(np.ascontiguousarray(survival[:, :, :width]), self.floor, self.survival_floor)
        return drafts(samples, offers, list(offers), *chosen)


def rooms(samples: Sequence[SampleState]) -> NDArray[np.int64]:
    """The most tokens that each sample can verify, [n]."""
    return np.array([sample.room for sample in samples], np.int64)


def drafts(
    samples: Sequence[SampleState],
    offers: Mapping[str, Offers],
    names: Sequence[str],
    picks: NDArray[np.int64],
    lengths: NDArray[np.int64],
    expected: float,
) -> Drafts:
    """Beginnings of offers: for each sample the place of its drafter in `names`, and a number of tokens, [n]."""
    width = int(lengths.max(initial=0))
    if not width:
        return Drafts()
    if len(names) == 1:
        offered = offers[names[0]].tokens[:, :width]
    else:
        offered = np.concatenate([_padded(offers[name].tokens, width) for name in names])
        offered = offered.take(picks * len(samples) + np.arange(len(samples)), axis=0)
    # All at once: a number taken from an array by itself takes as long as a dozen from a list.
    tokens, counts, drafters = offered.tolist(), lengths.tolist(), picks.tolist()
    places: Sequence[int] = range(len(samples))
    if 0 in counts:
        places = [i for i, count in enumerate(counts) if count]
        samples = [samples[i] for i in places]
        tokens, counts, drafters = ([each[i] for i in places] for each in (tokens, counts, drafters))
    for row, count in zip(tokens, counts, strict=True):
        del row[count:]
    ids = [sample.sample_id for sample in samples]
    origins = _origins(offers, names, places, drafters)
    return Drafts(dict(zip(ids, tokens, strict=True)), dict(zip(ids, origins, strict=True)), expected)


def _padded(tokens: NDArray[np.int32], width: int) -> NDArray[np.int32]:
    """The first `width` tokens of each offer, with zeros where there are less."""
    if tokens.shape[1] >= width:
        return tokens[:, :width]
    padded = np.zeros((len(tokens), width), np.int32)
    padded[:, : tokens.shape[1]] = tokens
    return padded


def _origins(
    offers: Mapping[str, Offers], names: Sequence[str], places: Sequence[int], picked: Sequence[int]
) -> Iterable[tuple[str, str]]:
    """The drafter and the origin of the offers for some samples, by their places and those of their drafters."""
    own = [(name, name) for name in names]
    sources = [offers[name].sources for name in names]
    if not any(sources):
        return map(own.__getitem__, picked)
    return [
        (names[pick], sources[pick][i] or names[pick]) if sources[pick] else own[pick]
        for i, pick in zip(places, picked, strict=True)
    ]


def context_of(samples: Sequence[SampleState]) -> int:
    """The samples' lengths together, in tokens."""
    return sum([len(sample.prompt) + len(sample.response) for sample in samples])
