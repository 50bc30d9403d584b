"""Plan of the attention of branches, for kernels that know causal attention over blocks and nothing else. Pure.

A branch sees the context up to where it forks off, and its own tokens, and its KV lies in slots behind those of
the primary chain. So each is laid out as if it were a sample of its own: in a copy of the blocks of its sample, of
which those from the fork on are private to it and have the KV of its path in the places of its positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.generation.engine.attention.branches import BranchLayout
from services.generation.engine.sampling.rows import IntArray


@dataclass(frozen=True, slots=True)
class BranchRun:
    """A segment off the primary chain, of the sample at a `place` of the batch.

    `before` counts the tokens of the context up to its path: prompt, response and those of the primary chain up to
    the fork. `path` are the tokens of the step from there to the segment's end, of which the last `own` are the
    segment's.
    """

    place: int
    before: int
    path: Sequence[int]
    own: int


@dataclass(frozen=True, slots=True)
class BranchPlan:
    """Runs laid out in a copy of some blocks of KV.

    `sources` [b] are the blocks to copy. KV of the `path` tokens [p] of the step goes to `slots` [p] of the copies.
    Queries are the `own` tokens [q]; `starts` [runs + 1] cuts them by run, `lengths` [runs] are the contexts,
    queries included, and `table` [runs, *] the copied blocks that these are in.
    """

    sources: IntArray
    path: IntArray
    slots: IntArray
    own: IntArray
    starts: IntArray
    lengths: IntArray
    table: IntArray


def runs_of(layout: BranchLayout) -> list[BranchRun]:
    """Return the runs of a step."""
    segments, rows = layout.segments, layout.rows
    cu, owning = segments.rows.cu, segments.rows.samples
    found = []
    for segment in np.flatnonzero(segments.forks >= 0).tolist():
        place, end = int(segments.owners[segment]), int(cu[segment + 1])
        root, at = int(rows.cu[place]), segment
        path = list(range(int(cu[segment]), end))
        while True:
            fork = int(segments.forks[at])
            at = int(owning[fork])
            if segments.forks[at] < 0:
                break
            path = [*range(int(cu[at]), fork + 1), *path]
        tokens = [int(layout.starts[place]) + row - root for row in path]
        before = int(layout.computed[place]) + 1 + fork - root
        found.append(BranchRun(place, before, tokens, end - int(cu[segment])))
    return found


def plan_of(runs: Sequence[BranchRun], table: IntArray, block_size: int) -> BranchPlan:
    """Lay out runs, at least one.

    Args:
        runs: of a step.
        table: the blocks of each sample, [n, *].
        block_size: tokens of a block.
    """
    sources: list[int] = []
    shared: dict[int, int] = {}
    # Blocks before the forks are copied once for all branches of a sample.
    for place in dict.fromkeys(run.place for run in runs):
        whole = max(run.before for run in runs if run.place == place) // block_size
        shared[place] = len(sources)
        sources += table[place, :whole].tolist()
    tables, slots = list[list[int]](), list[int]()
    for run in runs:
        length, first = run.before + len(run.path), run.before // block_size
        last = -(-length // block_size)
        private = len(sources)
        sources += table[run.place, first:last].tolist()
        tables.append([*range(shared[run.place], shared[run.place] + first), *range(private, len(sources))])
        begin = private * block_size + run.before % block_size
        slots += range(begin, begin + len(run.path))
    own = [token for run in runs for token in run.path[-run.own :]]
    blocks = np.zeros((len(runs), max(map(len, tables))), np.int64)
    for row, each in zip(blocks, tables, strict=True):
        row[: len(each)] = each
    return BranchPlan(
        np.array(sources, np.int64),
        np.array([token for run in runs for token in run.path], np.int64),
        np.array(slots, np.int64),
        np.array(own, np.int64),
        np.concatenate(([0], np.cumsum([run.own for run in runs]))),
        np.array([run.before + len(run.path) for run in runs], np.int64),
        blocks,
    )
