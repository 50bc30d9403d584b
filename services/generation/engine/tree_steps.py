"""Draft trees in the steps of a V1 runner: positions of branches, their attention, and their KV once accepted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from services.generation.engine.attention.branch_plan import runs_of
from services.generation.engine.attention.cpu_trees import STEP
from services.generation.engine.draft_tree import chain_length
from services.generation.engine.sampling.rows import IntArray, Rows
from services.generation.engine.sampling.sampler import Verified
from services.generation.engine.sampling.segments import TreeSegments, segments_of


class TreeSteps:
    """Trees of the steps of one runner: told before a step, laid out in it, and forgotten with it."""

    def __init__(self) -> None:
        self.told: Mapping[str, Sequence[int]] = {}
        """Parents of the next step's drafts, of the samples that have branches."""
        # First token of each sample in the step, and tokens that it had KV of before.
        self._starts = self._computed = np.empty(0, np.int64)
        self._rows: Rows | None = None
        self.segments: TreeSegments | None = None
        """Of the step that is under way; None if it has no branches."""

    def lay_out(self, batch: Any, rows: Rows, starts: IntArray, positions: torch.Tensor) -> None:
        """Lay out the step that vLLM has prepared as one without trees.

        Args:
            batch: vLLM's.
            rows: the layout by sample, with the drafts that were scheduled: of a tree the first ones, a tree again.
            starts: place of each sample's first token in the step, [n].
            positions: of the tokens of the step; those of branches are changed.
        """
        told, self.told = self.told, {}
        self.segments = None
        trees = {}
        for sample_id, parents in told.items():
            place = batch.req_id_to_index.get(sample_id)
            scheduled = parents if place is None else parents[: int(rows.cu[place + 1] - rows.cu[place]) - 1]
            if place is not None and chain_length(scheduled) < len(scheduled):
                trees[place] = scheduled
        if not trees:
            STEP.begin(())
            return
        segments = segments_of(rows, trees)
        n = len(rows.cu) - 1
        computed = batch.num_computed_tokens_cpu[:n].astype(np.int64)
        self._rows, self._starts, self._computed, self.segments = rows, starts, computed, segments
        STEP.begin(runs_of(segments, rows, starts, computed))
        branches = np.flatnonzero(segments.forks[segments.rows.samples] >= 0)
        tokens, _, own = self._places(branches)
        positions[torch.from_numpy(tokens).to(positions.device)] = torch.from_numpy(own).to(positions.device)

    def computed(self) -> None:
        """Let no forward pass but that of the step have branches."""
        STEP.computed()

    def keep(self, verified: Verified) -> None:
        """Put the KV of the branches that were accepted where chains have theirs, and forget the step."""
        segments, emitted = self.segments, verified.rows
        assert segments is not None
        assert emitted is not None
        STEP.move(*self._places(emitted[segments.forks[segments.rows.samples[emitted]] >= 0]))
        self.segments = None

    def _places(self, index: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """Return of some rows the token in the step, the sample's place, and the position in the sample."""
        rows, segments = self._rows, self.segments
        assert rows is not None
        assert segments is not None
        places = rows.samples[index]
        depths = segments.rows.row_positions[index] - rows.positions[places]
        return self._starts[places] + rows.offsets[index], places, self._computed[places] + depths
