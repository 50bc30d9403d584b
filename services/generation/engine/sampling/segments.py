"""Segments of a step with draft trees: rows of logits that follow one another as those of a chain do. Pure.

A sample's rows are cut wherever a row is not the child of the row before. Each segment is then verified as if it
were a chain of a sample of its own, at its own position, by what verifies chains: noise depends on seed and
position alone. The walk through the trees comes afterwards. A segment is reached where its parent is the last row
that a reached segment emits, and the token drawn there is the segment's first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from services.generation.engine.draft_tree import ROOT
from services.generation.engine.sampling.rows import IntArray, Rows


@dataclass(frozen=True, slots=True)
class TreeSegments:
    """S segments of n samples with R rows, in their order. A sample's first segment is its primary chain.

    `rows` has a segment where it usually has a sample. `owners` [S] are the samples, `primary` [n] the samples'
    first segments, `forks` [S] the row that is a segment's parent and `first` [S] its first token; both are -1 for
    primary ones.
    """

    rows: Rows
    owners: IntArray
    primary: IntArray
    forks: IntArray
    first: IntArray

    def emitted(self, tokens: IntArray, counts: IntArray) -> tuple[IntArray, IntArray]:
        """Return the rows that the samples emit, in order, and how many each does, [n].

        Args:
            tokens: drawn at each row, [R].
            counts: rows that each segment would emit if it were reached, [S].
        """
        ends = self.rows.cu[:-1] + counts
        reached = self.forks < 0
        # Of those that branch off, the segment, and whether it is there that its parent ends.
        branches = np.flatnonzero(~reached)
        parents = self.rows.samples[self.forks[branches]]
        taken = (ends[parents] == self.forks[branches] + 1) & (
            tokens[self.forks[branches]] == self.first[branches]
        )
        branches, parents = branches[taken], parents[taken]
        # Of a segment's branches one is taken at most, so each round goes on by a segment of every sample.
        while not reached[branches].all():
            new = branches[reached[parents] & ~reached[branches]]
            if not len(new):
                break
            reached[new] = True
        owners = self.rows.samples
        found = np.flatnonzero(reached[owners] & (self.rows.offsets < counts[owners]))
        samples = np.bincount(self.owners[owners[found]], minlength=len(self.primary))
        return found, samples.astype(np.int64)


def segments_of(rows: Rows, trees: Mapping[int, Sequence[int]]) -> TreeSegments:
    """Return the segments of a step.

    Args:
        rows: the layout by sample.
        trees: by its index, the parents of the drafts of each sample that has branches.
    """
    count, n = int(rows.cu[-1]), len(rows.cu) - 1
    before, depth = np.arange(count) - 1, rows.offsets.copy()
    before[rows.cu[:-1]] = -1
    for i, parents in trees.items():
        root = int(rows.cu[i])
        for row, parent in enumerate(parents, root + 1):
            above = root if parent == ROOT else root + 1 + parent
            before[row] = above
            depth[row] = depth[above] + 1
    tokens = np.full(count, -1)
    own = np.ones(count, bool)
    own[rows.cu[:-1]] = False
    tokens[own] = rows.drafts
    begins = before != np.arange(count) - 1
    begins[rows.cu[:-1]] = True
    starts = np.flatnonzero(begins)
    owners = rows.samples[starts]
    by_segment = Rows(np.append(starts, count), rows.positions[owners] + depth[starts], tokens[~begins])
    primary = np.searchsorted(starts, rows.cu[:-1])
    assert len(primary) == n
    return TreeSegments(by_segment, owners, primary, before[starts], tokens[starts])
