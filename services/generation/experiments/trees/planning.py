"""Plans of draft trees: branch tokens are ranked and taken together with the tokens of chains.

RLHFSpec's search (section 5.3) for trees: survival falls along each path, so the best tokens of all samples are
trees. It extends mode `planner`, and plans chains as that does where no drafter proposes branches. Drafter `suffix`
proposes them: the alternatives that the index has for some tokens of a continuation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from kernels.late_module import LateModule
from services.generation.drafters.suffix import SuffixDrafter, spread
from services.generation.engine.experiments.trees.tree import ROOT, DraftTree
from services.generation.speculation.drafter import DrafterSetting, Proposals, ProposalsByName, Samples
from services.generation.speculation.modes import PlannerMode, ProposedTokens
from services.generation.speculation.plan import Drafts, drafts
from services.generation.speculation.selection import (
    Bools,
    Floats,
    Ints,
    SelectedCount,
    draft_token_counts,
    survivals,
)

if TYPE_CHECKING:
    from kernels.suffix_index import Continuations

_compiled: Any = LateModule("services.generation.experiments.trees.compiled")


@dataclass(frozen=True, slots=True, eq=False)
class ProposedBranches:
    """Branches of the n proposals of a step, of which each has up to w tokens.

    tokens [n, m] are integers; acceptance [n, m] float64 is the probability that a token is accepted if all before
    it in its path are, 0 where there is no token. parents [n, m] say what a token follows: -1 the sample's last
    token, below w a token of the proposal, and from w on one of these, counted from there, before its own place.
    """

    tokens: NDArray[np.int32]
    acceptance: NDArray[np.float64]
    parents: NDArray[np.int64]

    def check(self, samples: int, window: int, vocab_size: int) -> None:
        """Raise ValueError unless these fit proposals for `samples` samples, of up to `window` tokens."""
        shape, place = self.tokens.shape, np.arange(self.tokens.shape[-1])
        if len(shape) != 2 or shape[0] != samples or not shape == self.acceptance.shape == self.parents.shape:
            raise ValueError(f"branches of shape {shape} for {samples} samples")
        if self.tokens.dtype.kind not in "iu" or not 0 <= self.tokens.min() <= self.tokens.max() < vocab_size:
            raise ValueError(f"a branch token outside the vocabulary of {vocab_size}")
        if (
            self.acceptance.dtype.kind != "f"
            or not 0.0 <= self.acceptance.min() <= self.acceptance.max() <= 1
        ):
            raise ValueError("a prediction of a branch token that is no probability")
        if (
            self.parents.dtype != np.int64
            or not ((self.parents >= -1) & (self.parents < window + place)).all()
        ):
            raise ValueError("a branch token without a parent before it")


@dataclass(frozen=True, slots=True, eq=False)
class TreeProposals(Proposals):
    """Proposals of one drafter with alternatives to some of their tokens; other modes verify only the chains."""

    branches: ProposedBranches | None = None

    def only(self, wanted: Sequence[bool]) -> TreeProposals:
        """Return the proposals for the wanted samples [n] and none for the others."""
        keep, branches = np.asarray(wanted)[:, None], self.branches
        if branches is not None:
            branches = replace(branches, acceptance=branches.acceptance * keep)
        return replace(self, acceptance=self.acceptance * keep, branches=branches)

    def check(self, samples: int, vocab_size: int) -> None:
        """Raise ValueError if the branches do not fit `samples` proposals, or are not valid."""
        if self.branches is not None:
            self.branches.check(samples, self.tokens.shape[1], vocab_size)


@dataclass(slots=True)
class TreeDrafts(Drafts):
    """Drafts of a step of which some are trees."""

    def longest(self, sample_id: str, drafted: int) -> int:
        """Return the depth of a tree, if it is less than `drafted`: at most one of its paths is accepted."""
        draft = self.tokens.get(sample_id)
        return min(drafted, draft.depth) if isinstance(draft, DraftTree) else drafted


@dataclass(slots=True)
class TreeCandidates(ProposedTokens):
    """Proposed tokens of a step, with the survival of the branches [n, m] of the drafter at place `drafter`."""

    drafter: int
    branches: Floats

    @classmethod
    def of(cls, made: Sequence[Proposals], room: Ints, survival: Floats) -> TreeCandidates | None:
        """Return the tokens with the branches of the first drafter that has any; None if none has.

        Its tokens in `survival` are cut: a chain and its branches together have at most as many as a chain may.
        """
        for drafter, proposals in enumerate(made):
            if (own := getattr(proposals, "branches", None)) is not None:
                found = np.zeros(own.tokens.shape)
                acceptance = np.ascontiguousarray(own.acceptance, np.float64)
                window = proposals.tokens.shape[1]
                _compiled.survive_trees(survival[drafter], acceptance, own.parents, window, room, found)
                return cls(survival, drafter, found)
        return None

    @property
    def proposed(self) -> int:
        """Number of the tokens, branches included, if each sample has its longest proposal."""
        chains = self.survival if len(self.survival) == 1 else self.survival.any(0)
        return int(np.count_nonzero(chains)) + int(np.count_nonzero(self.branches))

    def search(self, counts: Ints, seconds: Floats, price: float) -> SelectedCount:
        """Return the best of the `counts` of tokens to verify (see `selection.search`)."""
        if seconds.shape != counts.shape:
            raise ValueError(f"{seconds.size} step times for {counts.size} numbers of draft tokens")
        picks, buckets = np.empty(self.survival.shape[1], np.int64), np.empty((_compiled.BUCKETS, 2))
        own = (self.survival, self.branches, self.drafter)
        best = _compiled.search_trees(*own, counts, seconds, price, picks, buckets)
        return SelectedCount(picks, buckets, *best)

    def taken(self, found: SelectedCount) -> tuple[Ints, float, Bools]:
        """Return the tokens that were found, more than 0, and their expected number.

        Returns:
            The number of tokens in each sample's chain [n], the sum of survival, and a mask of the branch tokens
            [n, m].
        """
        lengths, taken = np.empty_like(found.picks), np.empty(self.branches.shape, np.bool_)
        own = (self.survival, self.branches, self.drafter, found.picks, found.buckets, found.tokens)
        return lengths, _compiled.cut_trees(*own, lengths, taken), taken

    def cut(self, samples: Samples, proposals: ProposalsByName, found: SelectedCount) -> Drafts:
        """Return the drafts of the tokens that were found; ValueError if branches repeat tokens."""
        lengths, expected, taken = self.taken(found)
        chains = drafts(samples, proposals, found.picks, lengths, expected)
        name = list(proposals)[self.drafter]
        made = TreeDrafts(chains.tokens, chains.origins, expected)
        _add_branches(made, samples, name, proposals, taken)
        return made


def _add_branches(
    made: Drafts, samples: Samples, name: str, proposals: Mapping[str, Any], taken: Bools
) -> None:
    """Append the taken branch tokens [n, m] of a drafter to the planned chains of its proposals."""
    branches, window = proposals[name].branches, proposals[name].tokens.shape[1]
    for i in np.flatnonzero(taken.any(1)).tolist():
        nodes, sample_id = np.flatnonzero(taken[i]), samples[i].sample_id
        chain = list(made.tokens.get(sample_id, ()))
        places = {window + node: place for place, node in enumerate(nodes.tolist(), len(chain))}
        parents = [
            *range(ROOT, len(chain) - 1),
            *(places.get(parent, parent) for parent in branches.parents[i, nodes].tolist()),
        ]
        made.tokens[sample_id] = DraftTree(chain + branches.tokens[i, nodes].tolist(), parents)
        made.origins[sample_id] = (name, name)


@dataclass(slots=True)
class TreeMode(PlannerMode):
    """Mode `planner` where the engine verifies trees."""

    def candidates(self, proposals: ProposalsByName, room: Ints) -> ProposedTokens:
        """Return the proposed tokens, at most `room` [n] of each sample."""
        chains = PlannerMode.candidates(self, proposals, room)
        return TreeCandidates.of(list(proposals.values()), room, chains.survival) or chains


def warm_up() -> None:
    """Compile or load the compiled functions, so that the first step does not wait for them."""
    own = ProposedBranches(np.ones((1, 1), np.int32), np.ones((1, 1)), np.full((1, 1), ROOT))
    made, room = (
        [TreeProposals(np.zeros((1, 1), np.int32), np.ones((1, 1)), branches=own)],
        np.ones(1, np.int64),
    )
    forked = TreeCandidates.of(made, room, survivals(made, room, 1))
    assert forked is not None
    forked.taken(forked.search(draft_token_counts(1, 1), np.ones(2), 0.0))


class ForkingSuffixDrafter(SuffixDrafter):
    """Drafter `suffix` that proposes at most `alternatives` alternatives in addition to a continuation."""

    @classmethod
    def build(cls, setting: DrafterSetting) -> Self:
        """Return the drafter of an engine. Imports numba, which vLLM must come before."""
        from kernels.suffix_index import warm_up as warm_up_index

        made = super().build(setting)
        made.alternatives = setting.config.max_branches
        warm_up_index(made.alternatives)
        warm_up()
        return made

    def proposals(self, found: Continuations, rows: Sequence[int] | None, count: int) -> Proposals:
        """Return proposals with branches for `count` samples, of which the ones at `rows` have continuations."""
        made, own = super().proposals(found, rows, count), found.branches
        if own is None:
            return made
        branches = ProposedBranches(
            spread(own.tokens, rows, count, np.int32),
            spread(own.shares, rows, count, np.float64),
            spread(own.parents, rows, count, np.int64),
        )
        return TreeProposals(made.tokens, made.acceptance, branches=branches)
