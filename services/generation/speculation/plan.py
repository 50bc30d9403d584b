"""The plan of a step: the draft tokens to verify for each sample, and what is predicted of them.

`FixedLengthPlanner` makes the simplest plan: each sample verifies its most promising proposal, cut to the
window, to the sample's length limit, and to where its tokens are still likely to be reached.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from services.generation.engine.types import EngineSampleState
from services.generation.speculation.drafter import Proposals
from services.generation.speculation.selection.selection import longest, survivals

UNBOUNDED = 1 << 30
"""Sentinel: no limit on the verified tokens of a step."""
# Smallest survival probability that stands for a token.
NOTHING = float(np.finfo(np.float64).tiny)


class Draft(NamedTuple):
    """Tokens to verify for a sample, the drafter that proposed them, and their origin in results."""

    drafter: str
    tokens: list[int]
    source: str


@dataclass(slots=True, eq=False)
class Drafts(Mapping[str, Draft]):
    """The drafts of a step, by sample id; samples without one decode plainly."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    origins: dict[str, tuple[str, str]] = field(default_factory=dict)
    """The drafter of each draft, and its origin in results."""
    expected: float = 0.0
    """Accepted tokens that the drafters predict, of all samples together."""
    saved: float = inf
    """Predicted seconds saved over decoding as many tokens plainly; infinite if there is no prediction."""

    @property
    def count(self) -> int:
        """Draft tokens of all samples together."""
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
    """Inputs of a step's predicted time: samples, verified tokens (rows), and context tokens of all samples."""

    requests: int
    rows: int
    context: int


class DraftPlanner:
    """Interface of a planner: chooses the drafts of each step. Methods that a planner does not need do nothing."""

    window: int
    """Most tokens of a proposal."""

    @property
    def measures(self) -> bool:
        """True if `stepped` wants the time of the step that was planned last."""
        return False

    def wants(self, drafter: str, samples: Sequence[EngineSampleState]) -> Sequence[bool] | bool:
        """Return True if a drafter may propose for all samples, False for none, or one value per sample."""
        return True

    def choose(
        self, samples: Sequence[EngineSampleState], proposals: Mapping[str, Proposals], rows: int = UNBOUNDED
    ) -> Drafts:
        """Return the drafts of the next step.

        Args:
            samples: the samples that can verify a draft.
            proposals: of each drafter that has any.
            rows: most verified tokens of the step, one of each sample included.
        """
        raise NotImplementedError

    def back_off(self, samples: Sequence[EngineSampleState]) -> None:
        """Record a step that is not planned because drafting backs off."""

    def back_off_again(self) -> None:
        """Record another step that is not planned, with the same samples as the last one."""

    def stepped(self, shape: StepShape, seconds: float) -> None:
        """Learn the measured time of a step."""

    def verified(self, source: str, drafted: int, accepted: int) -> None:
        """Record the outcome of one draft of the last step."""


@dataclass(frozen=True)
class FixedLengthPlanner(DraftPlanner):
    """Planner with a fixed draft length: at most `window` tokens per sample and step.

    A proposal whose first token has an acceptance below `floor` is ignored, and tokens are cut from the first one
    whose survival probability is below `survival_floor`. Drafts are cut to equal lengths if the step would exceed
    its verified tokens.
    """

    window: int
    floor: float = 0.0
    survival_floor: float = 0.0

    def choose(
        self, samples: Sequence[EngineSampleState], proposals: Mapping[str, Proposals], rows: int = UNBOUNDED
    ) -> Drafts:
        """Return the drafts of the next step; see `DraftPlanner`."""
        if not (samples and proposals):
            return Drafts()
        survival = survivals(list(proposals.values()), rooms(samples), self.window)
        chosen = longest(survival, self.floor, self.survival_floor)
        width, room = int(chosen.lengths.max()), max(0, rows - len(samples))
        while chosen.lengths.sum() > room:
            width -= 1
            if not width:
                return Drafts()
            chosen = longest(np.ascontiguousarray(survival[:, :, :width]), self.floor, self.survival_floor)
        return drafts(samples, proposals, list(proposals), *chosen)


def rooms(samples: Sequence[EngineSampleState]) -> NDArray[np.int64]:
    """Return the most draft tokens that each sample can verify, [n]."""
    return np.array([sample.room for sample in samples], np.int64)


def drafts(
    samples: Sequence[EngineSampleState],
    proposals: Mapping[str, Proposals],
    names: Sequence[str],
    picks: NDArray[np.int64],
    lengths: NDArray[np.int64],
    expected: float,
) -> Drafts:
    """Return the first `lengths` [n] tokens of the proposals of each sample's drafter, `names[picks]` [n]."""
    width = int(lengths.max(initial=0))
    if not width:
        return Drafts()
    if len(names) == 1:
        proposed = proposals[names[0]].tokens[:, :width]
    else:
        proposed = np.concatenate([_padded(proposals[name].tokens, width) for name in names])
        proposed = proposed.take(picks * len(samples) + np.arange(len(samples)), axis=0)
    # Converted to lists all at once: indexing an array takes as long as indexing a dozen lists.
    tokens, counts, drafters = proposed.tolist(), lengths.tolist(), picks.tolist()
    places: Sequence[int] = range(len(samples))
    if 0 in counts:
        places = [i for i, count in enumerate(counts) if count]
        samples = [samples[i] for i in places]
        tokens, counts, drafters = ([each[i] for i in places] for each in (tokens, counts, drafters))
    for row, count in zip(tokens, counts, strict=True):
        del row[count:]
    ids = [sample.sample_id for sample in samples]
    origins = _origins(proposals, names, places, drafters)
    return Drafts(dict(zip(ids, tokens, strict=True)), dict(zip(ids, origins, strict=True)), expected)


def _padded(tokens: NDArray[np.int32], width: int) -> NDArray[np.int32]:
    """Return the first `width` tokens of each proposal, padded with zeros."""
    if tokens.shape[1] >= width:
        return tokens[:, :width]
    padded = np.zeros((len(tokens), width), np.int32)
    padded[:, : tokens.shape[1]] = tokens
    return padded


def _origins(
    proposals: Mapping[str, Proposals], names: Sequence[str], places: Sequence[int], picked: Sequence[int]
) -> Iterable[tuple[str, str]]:
    """Return drafter and origin of the proposals for some samples, by their places and the picked drafters'."""
    own = [(name, name) for name in names]
    sources = [proposals[name].sources for name in names]
    if not any(sources):
        return map(own.__getitem__, picked)
    return [
        (names[pick], sources[pick][i] or names[pick]) if sources[pick] else own[pick]
        for i, pick in zip(places, picked, strict=True)
    ]


def context_of(samples: Sequence[EngineSampleState]) -> int:
    """Return the context length of all samples together, in tokens."""
    return sum([len(sample.prompt) + len(sample.response) for sample in samples])
