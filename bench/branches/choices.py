"""Choices of a drafter along a sample: which of them its tokens were, and how sure the drafter was. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

CHOICES = 3
"""Branches at a position that are looked at."""
_BUCKETS = 12
_PRIOR = 2.0
"""Tokens by which a bucket is drawn towards the mean of all."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Choices:
    """Choices of one drafter along one sample of n tokens that can be drafted.

    ranks [depth, n] int64: which choice a token was where it is at that place of a draft (0: the first), CHOICES
    where it was none of them. certainty [depth, n]: rises with how likely the first choice is, on any scale.
    Drafters to whom the place does not matter have depth 1.
    """

    ranks: NDArray[np.int64]
    certainty: Floats


@dataclass(frozen=True, slots=True)
class BranchCounts:
    """Tokens by the drafter's choice that they were: `first`, `second`, `third`, and all `tokens`."""

    tokens: int
    first: int
    second: int
    third: int = 0

    @classmethod
    def of(cls, ranks: Sequence[NDArray[np.int64]]) -> BranchCounts:
        """Count ranks of any shape."""
        counts = np.bincount(np.concatenate([each.ravel() for each in ranks]), minlength=CHOICES + 1)
        return cls(int(counts.sum()), *(int(each) for each in counts[:CHOICES]))

    @property
    def accepted(self) -> float:
        """Share of the tokens that the drafter's first choice is."""
        return self.first / self.tokens

    @property
    def saved(self) -> float:
        """Share of the mismatches at which the second choice is the token."""
        return self._of_mismatches(self.second)

    @property
    def saved_by_third(self) -> float:
        """Share of the mismatches at which the third choice is the token."""
        return self._of_mismatches(self.third)

    def _of_mismatches(self, count: int) -> float:
        missed = self.tokens - self.first
        return count / missed if missed else 0.0


def ranks_of(scores: NDArray[np.float32], tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return which choice of `scores` [n, V] each token [n] is, CHOICES beyond; of equal ones the better."""
    better = (scores > scores[np.arange(len(tokens)), tokens][:, None]).sum(1)
    return np.minimum(better, CHOICES)


def lead(scores: NDArray[np.float32]) -> Floats:
    """Return by how much the first choice of each row [n, V] leads the second, [n]."""
    best = np.partition(scores, -2, axis=1)[:, -2:]
    return (best[:, 1] - best[:, 0]).astype(np.float64)


def calibrated(learned: Sequence[Choices], asked: Sequence[Choices]) -> list[Floats]:
    """Return, for each sample asked for, the probability [depth, n, CHOICES] that each choice is the token.

    It is the share among tokens of the samples learned from that are at the same place of a draft and of which the
    drafter was as certain.
    """
    depth = learned[0].ranks.shape[0]
    shares = [np.empty((each.ranks.shape[1], CHOICES)) for _ in range(depth) for each in asked]
    for place in range(depth):
        # No draft has its place k at one of the first k tokens.
        certainty = np.concatenate([each.certainty[place, place:] for each in learned])
        ranks = np.concatenate([each.ranks[place, place:] for each in learned])
        edges = np.unique(np.quantile(certainty, np.arange(1, _BUCKETS) / _BUCKETS))
        buckets = np.searchsorted(edges, certainty, side="right")
        whole = np.bincount(ranks, minlength=CHOICES + 1)[:CHOICES] / max(len(ranks), 1)
        table = np.empty((len(edges) + 1, CHOICES))
        for bucket in range(len(table)):
            counts = np.bincount(ranks[buckets == bucket], minlength=CHOICES + 1)
            table[bucket] = (counts[:CHOICES] + _PRIOR * whole) / (counts.sum() + _PRIOR)
        for i, each in enumerate(asked):
            shares[place * len(asked) + i] = table[
                np.searchsorted(edges, each.certainty[place], side="right")
            ]
    return [np.stack(shares[i :: len(asked)]) for i in range(len(asked))]
