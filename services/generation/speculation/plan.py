"""The plan of a step: the draft tokens to verify for each sample, and what is predicted of them.

`FixedLengthPlanner` makes the simplest plan: each sample verifies its most promising proposal, cut to the
window, to the sample's length limit, and to where its tokens are still likely to be reached.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from services.generation.engine.types import EngineSampleState
from services.generation.speculation.drafter import Proposals
from services.generation.speculation.selection.selection import survivals

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
        survival[survival[:, :, 0] < self.floor] = 0.0
        picks, lengths, best = best_proposals(survival, self.survival_floor)
        width, room = int(lengths.max()), max(0, rows - len(samples))
        while lengths.sum() > room:
            width -= 1
            lengths = np.minimum(lengths, width)
        return drafts(samples, proposals, list(proposals), picks, lengths, float(best[:, :width].sum()))


def best_proposals(
    survival: NDArray[np.float64], floor: float
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """Return for each sample [n] the drafter with the most expected tokens, their number, and their survival.

    `survival` [drafters, n, width] below `floor` does not count; the survival that is returned is [n, width].
    """
    survival = np.where(survival < floor, 0.0, survival)
    picks = survival.sum(2).argmax(0)
    best = survival[picks, np.arange(len(picks))]
    return picks, np.count_nonzero(best, axis=1), best


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
    proposed = np.zeros((len(names), len(samples), width), np.int32)
    for name, each in zip(names, proposed, strict=True):
        each[:, : proposals[name].tokens.shape[1]] = proposals[name].tokens[:, :width]
    # Converted to lists all at once: indexing an array takes as long as indexing a dozen lists.
    tokens = proposed.reshape(-1, width).take(picks * len(samples) + np.arange(len(samples)), axis=0).tolist()
    short = np.flatnonzero(lengths < width)
    for i, length in zip(short.tolist(), lengths[short].tolist(), strict=True):
        del tokens[i][length:]
    ids, drafters = [sample.sample_id for sample in samples], picks.tolist()
    chosen = dict(zip(ids, tokens, strict=True))
    own = [(name, name) for name in names]
    origins = {each: own[pick] for each, pick in zip(ids, drafters, strict=True)}
    for place, name in enumerate(names):
        for i, source in enumerate(proposals[name].sources):
            if source and drafters[i] == place:
                origins[ids[i]] = name, source
    for i in np.flatnonzero(lengths == 0).tolist():
        del chosen[ids[i]], origins[ids[i]]
    return Drafts(chosen, origins, expected)


def context_of(samples: Sequence[EngineSampleState]) -> int:
    """Return the context length of all samples together, in tokens."""
    return sum([sample.length for sample in samples])
