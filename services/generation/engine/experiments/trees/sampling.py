"""Verify draft trees: choose the samples that may have them, cut their rows into segments, and walk the segments.

A sample's rows are cut wherever a row is not the child of its predecessor. The sampler then verifies each segment
as a chain of a separate sample, at its position in the response, because noise depends only on seed and position.
The walk through the trees comes afterwards: a segment is reached if its parent is the last row that a reached
segment emits, and the token drawn there is the segment's first.

A sample that may not have trees verifies the primary chain of each draft, as if there were no branches.
model_support.py decides which engines verify trees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from kernels.short_query_attention.inputs import LONGEST_TREE
from services.generation.engine.experiments.trees.tree import ROOT
from services.generation.engine.sampling.constraints import Histories, RowMasks
from services.generation.engine.sampling.inputs import (
    CACHED_KEY,
    RECORDED_KEY,
    SETTINGS_KEY,
    BatchSettings,
    CachedRollout,
    DraftsOfRow,
)
from services.generation.engine.sampling.rows import IntArray, Rows
from services.generation.engine.sampling.sampler import Verified, sample
from services.generation.engine.types import Verifier

MOST_DRAFTED = LONGEST_TREE - 1
"""Tokens of the largest tree: a mask has a bit for each of them, and one for the root."""


def sample_refusal(extra: Mapping[str, Any]) -> str | None:
    """Return why a sample verifies only chains; None if it can verify trees.

    Args:
        extra: its data for the sampler (sampling/inputs.py).
    """
    own = extra[SETTINGS_KEY]
    penalties = (own["presence_penalty"], own["frequency_penalty"], own["repetition_penalty"] - 1)
    reasons = (
        (
            own["verifier"] is not Verifier.COUPLED or CACHED_KEY in extra or RECORDED_KEY in extra,
            "it is not verified by coupled sampling alone",
        ),
        (bool(own["json_schema"]), "it follows a grammar"),
        (any(penalties), "it has penalties"),
    )
    return next((reason for applies, reason in reasons if applies), None)


@dataclass(frozen=True, slots=True)
class TreeSegments:
    """S segments of n samples with R rows, in order. A sample's first segment is its primary chain.

    `rows` is the layout with segments in place of samples. `owners` [S] has the sample of each segment, `primary`
    [n] the first segment of each sample, `forks` [S] the row that is a segment's parent, and `first` [S] its
    first token; the last two are -1 for primary segments.
    """

    rows: Rows
    owners: IntArray
    primary: IntArray
    forks: IntArray
    first: IntArray

    def emitted(self, tokens: IntArray, counts: IntArray) -> tuple[IntArray, IntArray]:
        """Return the rows that the samples emit, in order, and the number of rows of each sample, [n].

        Args:
            tokens: token drawn at each row, [R].
            counts: rows that each segment emits if it is reached, [S].
        """
        ends = self.rows.cu[:-1] + counts
        reached = self.forks < 0
        # The segments that branch off where their parent ends, at the token that was drawn there.
        branches = np.flatnonzero(~reached)
        parents = self.rows.samples[self.forks[branches]]
        taken = (ends[parents] == self.forks[branches] + 1) & (
            tokens[self.forks[branches]] == self.first[branches]
        )
        branches, parents = branches[taken], parents[taken]
        # At most one branch of a segment is taken, so each round advances every sample by one segment.
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
        rows: layout by sample.
        trees: parents of the drafts of each sample with branches, by the sample's index.
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


def sample_trees(
    logits: torch.Tensor,
    segments: TreeSegments,
    batch: BatchSettings,
    followed: Mapping[int, CachedRollout],
    masks: RowMasks | None = None,
    histories: Histories | None = None,
    recorded: Mapping[int, DraftsOfRow] | None = None,
) -> Verified:
    """Verify the drafts of a step with trees, and sample the next token of every sample.

    The arguments are as for `sampler.sample`, by sample. Everything that depends on a sample's history is correct
    only for samples without branches, which have only the primary chain.
    """
    owners, primary = segments.owners, segments.primary
    if histories is not None:
        slots, more = np.full(len(owners), -1), [histories.more[owner] for owner in owners.tolist()]
        slots[primary] = histories.slots
        histories = histories._replace(slots=slots, more=more)
    verified = sample(
        logits,
        segments.rows,
        BatchSettings.of([batch.samples[owner] for owner in owners.tolist()]),
        {int(primary[i]): rollout for i, rollout in followed.items()},
        masks,
        histories,
        None if recorded is None else {int(primary[i]): drafts for i, drafts in recorded.items()},
    )
    rows, counts = segments.emitted(verified.tokens, verified.counts)
    return replace(verified, counts=counts, reused=verified.reused[primary], rows=rows)
