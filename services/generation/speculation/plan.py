"""The plan of a step: the draft tokens to verify for each sample, and what is predicted of them.

`FixedLengthPlanner` makes the simplest plan: each sample verifies its most promising proposal, cut to the
window, to the sample's length limit, and to where its tokens are still likely to be reached.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np

from services.generation.speculation.drafter import ProposalsByName, Samples
from services.generation.speculation.selection.selection import Bools, Floats, Ints, survivals

UNBOUNDED = 1 << 30
"""Sentinel: no limit on the verified tokens of a step."""


@dataclass(slots=True)
class Drafts:
    """The drafts of a step, by sample id; samples without one decode plainly."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    origins: dict[str, tuple[str, str]] = field(default_factory=dict)
    """The drafter of each draft, and its origin in results."""
    expected: float = 0.0
    """Accepted tokens that the drafters predict, of all samples together."""
    saved: float = inf
    """Predicted seconds saved over decoding as many tokens plainly; infinite if there is no prediction."""
    parents: dict[str, list[int]] = field(default_factory=dict)
    """What each token follows in the drafts that are trees (engine/draft_tree.py)."""

    @property
    def count(self) -> int:
        """Draft tokens of all samples together."""
        return sum(map(len, self.tokens.values()))


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

    def wants(self, drafter: str, samples: Samples) -> Sequence[bool] | bool:
        """Return True if a drafter may propose for all samples, False for none, or one value per sample."""
        return True

    def plain_seconds(self, samples: int, context: int) -> float:
        """Return the predicted time of a step without drafts; 0 for a planner that predicts none."""
        return 0.0

    def choose(self, samples: Samples, proposals: ProposalsByName, rows: int = UNBOUNDED) -> Drafts:
        """Return the drafts of the next step.

        Args:
            samples: the samples that can verify a draft, at least one.
            proposals: of each drafter that has any.
            rows: most verified tokens of the step, one of each sample included.
        """
        raise NotImplementedError

    def back_off(self, samples: Samples) -> None:
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

    def choose(self, samples: Samples, proposals: ProposalsByName, rows: int = UNBOUNDED) -> Drafts:
        """Return the drafts of the next step; see `DraftPlanner`."""
        if not proposals:
            return Drafts()
        survival = survivals(list(proposals.values()), rooms(samples), self.window)
        survival[survival[:, :, 0] < self.floor] = 0.0
        picks, lengths, best = best_proposals(survival, self.survival_floor)
        width, room = int(lengths.max()), max(0, rows - len(samples))
        while lengths.sum() > room:
            width -= 1
            lengths = np.minimum(lengths, width)
        return drafts(samples, proposals, picks, lengths, float(best[:, :width].sum()))


def best_proposals(survival: Floats, floor: float) -> tuple[Ints, Ints, Floats]:
    """Return for each sample [n] the drafter with the most expected tokens, their number, and their survival.

    `survival` [drafters, n, width] below `floor` does not count; the survival that is returned is [n, width].
    """
    survival = np.where(survival < floor, 0.0, survival)
    picks = survival.sum(2).argmax(0)
    best = survival[picks, np.arange(len(picks))]
    return picks, np.count_nonzero(best, axis=1), best


def rooms(samples: Samples) -> Ints:
    """Return the most draft tokens that each sample can verify, [n]."""
    return np.array([sample.room for sample in samples], np.int64)


def drafts(
    samples: Samples, proposals: ProposalsByName, picks: Ints, lengths: Ints, expected: float
) -> Drafts:
    """Return the first `lengths` [n] tokens of each sample's drafter, of which `picks` [n] has the place."""
    tokens, origins, cuts = dict[str, list[int]](), dict[str, tuple[str, str]](), lengths.tolist()
    for place, (name, made) in enumerate(proposals.items()):
        here, own = np.flatnonzero((picks == place) & (lengths > 0)), (name, name)
        # Converted to lists all at once: indexing an array takes as long as indexing a dozen lists.
        for i, proposed in zip(here.tolist(), made.tokens[here].tolist(), strict=True):
            sample_id = samples[i].sample_id
            del proposed[cuts[i] :]
            tokens[sample_id] = proposed
            origins[sample_id] = (name, made.sources[i] or name) if made.sources else own
    return Drafts(tokens, origins, expected)


def add_branches(made: Drafts, samples: Samples, name: str, proposals: ProposalsByName, taken: Bools) -> None:
    """Put the taken branch tokens [n, m] of a drafter behind the chains of its proposals that are planned."""
    branches, window = proposals[name].branches, proposals[name].tokens.shape[1]
    assert branches is not None
    for i in np.flatnonzero(taken.any(1)).tolist():
        nodes, sample_id = np.flatnonzero(taken[i]), samples[i].sample_id
        chain = made.tokens.get(sample_id, [])
        places = {window + node: place for place, node in enumerate(nodes.tolist(), len(chain))}
        made.parents[sample_id] = [
            *range(-1, len(chain) - 1),
            *(places.get(parent, parent) for parent in branches.parents[i, nodes].tolist()),
        ]
        made.tokens[sample_id] = chain + branches.tokens[i, nodes].tolist()
        made.origins[sample_id] = (name, name)


def context_of(samples: Samples) -> int:
    """Return the context length of all samples together, in tokens."""
    return sum([sample.length for sample in samples])
