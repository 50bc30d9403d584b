"""Draft trees in the steps of a V1 runner: positions of branches, their attention, and their KV once accepted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from services.generation.engine.attention.branches import BranchAttention, BranchLayout
from services.generation.engine.draft_tree import chain_length
from services.generation.engine.sampling.rows import IntArray, Rows, put
from services.generation.engine.sampling.sampler import Verified
from services.generation.engine.sampling.segments import TreeSegments, segments_of


class TreeSteps:
    """Trees of the steps of one runner: told before a step, laid out in it, and forgotten with it."""

    def __init__(self, attention: BranchAttention) -> None:
        self._attention = attention
        self.told: Mapping[str, Sequence[int]] = {}
        """Parents of the next step's drafts, of the samples that have branches."""
        self._layout: BranchLayout | None = None

    @property
    def segments(self) -> TreeSegments | None:
        """Segments of the step that is under way; None if it has no branches."""
        return None if self._layout is None else self._layout.segments

    def lay_out(self, batch: Any, rows: Rows, starts: IntArray, positions: torch.Tensor) -> None:
        """Lay out the step that vLLM has prepared as one without trees.

        Args:
            batch: vLLM's.
            rows: the layout by sample, with the drafts that were scheduled: of a tree the first ones, a tree again.
            starts: place of each sample's first token in the step, and the number of its tokens, [n + 1].
            positions: of the tokens of the step, where the model reads them; those of branches are changed. vLLM
                has chosen the slots of their KV by then.
        """
        told, self.told = self.told, {}
        trees = {}
        for sample_id, parents in told.items():
            place = batch.req_id_to_index.get(sample_id)
            scheduled = parents if place is None else parents[: int(rows.cu[place + 1] - rows.cu[place]) - 1]
            if place is not None and chain_length(scheduled) < len(scheduled):
                trees[place] = scheduled
        self._layout = None
        if trees:
            computed = batch.num_computed_tokens_cpu[: len(rows.cu) - 1].astype(np.int64)
            self._layout = BranchLayout(rows, segments_of(rows, trees), starts, computed, trees)
        self._attention.begin(self._layout)
        if self._layout is not None:
            segments = self._layout.segments
            branches = np.flatnonzero(segments.forks[segments.rows.samples] >= 0)
            tokens, _, own = _places(self._layout, branches)
            there = put(positions.device, tokens=tokens, own=own)
            positions[there["tokens"]] = there["own"]

    def computed(self) -> None:
        """Let no forward pass but that of the step have branches."""
        self._attention.computed()

    def keep(self, verified: Verified) -> None:
        """Put the KV of the branches that were accepted where chains have theirs, and forget the step."""
        layout, emitted = self._layout, verified.rows
        assert layout is not None
        assert emitted is not None
        forks = layout.segments.forks[layout.segments.rows.samples[emitted]]
        tokens, targets, _ = _places(layout, emitted[forks >= 0])
        self._attention.move(tokens, targets)
        self._layout = None


def _places(layout: BranchLayout, index: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Return of some rows the token in the step, the one that a chain would have there, and the position."""
    rows = layout.rows
    places = rows.samples[index]
    depths = layout.segments.rows.row_positions[index] - rows.positions[places]
    starts = layout.starts[places]
    return starts + rows.offsets[index], starts + depths, layout.computed[places] + depths
