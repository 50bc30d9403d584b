"""Verify draft trees: choose the samples that may have them, cut their rows into segments, and walk the segments.

A sample's rows are cut wherever a row is not the child of its predecessor. Each segment is then verified by the
sampler as a chain of a separate sample, at its position in the response: noise depends on seed and position
alone. The walk through the trees comes afterwards. A segment is reached where its parent is the last row that a
reached segment emits, and the token drawn there is the segment's first.

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
from services.generation.engine.sampling.constraints import Histories, RowMasks
from services.generation.engine.sampling.inputs import (
    CACHED_KEY,
    NOISE_KEY,
    RECORDED_KEY,
    CachedRollout,
    DraftsOfRow,
    DrawSettings,
    SampleNoise,
)
from services.generation.engine.sampling.rows import IntArray, Rows
from services.generation.engine.sampling.sampler import Verified, sample
from services.generation.engine.trees.tree import ROOT
from services.generation.engine.types import Verifier

MOST_DRAFTED = LONGEST_TREE - 1
"""Tokens of the largest tree: a mask has a bit for each, and one for the root."""


def sample_refusal(extra: Mapping[str, Any]) -> str | None:
    """Return why a sample verifies chains only; None if it can verify trees.

    Args:
        extra: what travels with it to the sampler (sampling/noise.py).
    """
    noise = extra[NOISE_KEY]
    penalties = (noise["presence_penalty"], noise["frequency_penalty"], noise["repetition_penalty"] - 1)
    reasons = (
        (
            noise["verifier"] is not Verifier.COUPLED or CACHED_KEY in extra or RECORDED_KEY in extra,
            "it is not verified by coupled sampling alone",
        ),
        (bool(noise["json_schema"]), "it follows a grammar"),
        (any(penalties), "it has penalties"),
    )
    return next((reason for applies, reason in reasons if applies), None)


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


def sample_trees(
    logits: torch.Tensor,
    segments: TreeSegments,
    settings: DrawSettings,
    noise: list[SampleNoise],
    followed: Mapping[int, CachedRollout],
    masks: RowMasks | None = None,
    histories: Histories | None = None,
    recorded: Mapping[int, DraftsOfRow] | None = None,
) -> Verified:
    """Verify the drafts of a step with trees, and sample the next token of every sample.

    Arguments are those of `sampler.sample`, by sample. What goes by a sample's history is right for samples without
    branches only, of which the primary chain is all that they have.
    """
    owners, primary = segments.owners, segments.primary
    if histories is not None:
        slots, more = np.full(len(owners), -1), [histories.more[owner] for owner in owners.tolist()]
        slots[primary] = histories.slots
        histories = histories._replace(slots=slots, more=more)
    verified = sample(
        logits,
        segments.rows,
        DrawSettings(*(None if each is None else each[owners] for each in settings)),  # type: ignore[arg-type]
        [noise[owner] for owner in owners.tolist()],
        {int(primary[i]): rollout for i, rollout in followed.items()},
        masks,
        histories,
        None if recorded is None else {int(primary[i]): drafts for i, drafts in recorded.items()},
    )
    rows, counts = segments.emitted(verified.tokens, verified.counts)
    return replace(verified, counts=counts, reused=verified.reused[primary], rows=rows)
