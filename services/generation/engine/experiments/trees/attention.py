"""Compute the attention of the branches of draft trees on a GPU.

vLLM prepares a step as if it had no trees (steps.py). Our short-query kernel uses a mask of ancestors for the rows
of branches, and the KV of accepted branches is moved to the slots that a chain would have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from kernels.short_query_attention import AttentionStep
from kernels.short_query_attention.inputs import LONGEST_TREE, ancestor_mask
from services.generation.engine.experiments.trees.sampling import TreeSegments
from services.generation.engine.sampling.rows import IntArray, Rows, put


@dataclass(frozen=True, slots=True)
class BranchLayout:
    """Layout of a step of n samples in which some drafts have branches.

    `rows` and `segments` are its rows of logits, by sample and by segment. `starts` [n + 1] has the index of each
    sample's first token in the step, and the number of its tokens; `computed` [n] the tokens of each sample that
    had KV before. `parents` has the parents of the drafts with branches, by the sample's index in the batch.
    """

    rows: Rows
    segments: TreeSegments
    starts: IntArray
    computed: IntArray
    parents: Mapping[int, Sequence[int]]


class BranchAttention(Protocol):
    """Attention of the branches of one step at a time. vLLM lays KV out as if every draft were a chain."""

    def begin(self, layout: BranchLayout | None) -> None:
        """Compute these branches in the next forward pass; None for a step without branches."""

    def computed(self) -> None:
        """End the step's forward pass: later passes have no branches, but the data for `move` is kept."""

    def move(self, tokens: IntArray, targets: IntArray) -> None:
        """Write the KV of accepted branch tokens to the slots of a chain in all layers, and forget the step.

        Args:
            tokens: indices of the branch tokens in the step, [m].
            targets: indices of the tokens whose slots they take, [m]: the slots that a chain would have. A token
                may be both a source and a target.
        """


@dataclass(frozen=True, slots=True)
class _Apart:
    """Samples with branches as a separate step; `tokens` are the indices of their tokens in the whole step."""

    tokens: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor
    starts: torch.Tensor
    mask: torch.Tensor
    longest_query: int


class MaskedBranches:
    """Branches of the step that this process computes, by our kernel. There is one engine per process.

    The KV of a step is in the slots of its list of tokens. A step with a longer query is computed by vLLM's kernel,
    which has no mask; the samples with branches are then computed again, as a separate step over their rows of the
    block table. Both happen in forward passes whose attention Python launches: vLLM's graphs of whole steps are of
    plain decoding (model_support.py).

    The first layer that needs a step's tensors creates them. Nothing waits for the device.
    """

    longest = LONGEST_TREE

    def __init__(self) -> None:
        self.wanted = False
        """True if steps may have branches, so that the kernels for them are compiled with the others."""
        self._layout: BranchLayout | None = None
        self._mask: torch.Tensor | None = None
        self._apart: _Apart | None = None
        # By address, because layers may share one.
        self._caches: dict[int, torch.Tensor] = {}
        self._slots: torch.Tensor | None = None
        self._viewed: tuple[int, ...] = ()
        self._views: list[torch.Tensor] = []

    @property
    def active(self) -> bool:
        """True in the forward pass of a step with branches."""
        return self._layout is not None

    def begin(self, layout: BranchLayout | None) -> None:
        """Compute these branches in the next forward pass; None for a step without branches."""
        self._layout, self._mask, self._apart, self._slots = layout, None, None, None
        self._caches.clear()

    def computed(self) -> None:
        """End the step's forward pass: later passes have no branches, but the data for `move` is kept."""
        self._layout = None

    def keep(self, cache: torch.Tensor, slots: torch.Tensor) -> None:
        """Remember a layer's cache [blocks, heads, block, content], and the slots of the step's tokens."""
        self._caches.setdefault(cache.data_ptr(), cache)
        self._slots = slots

    def masked(self, step: AttentionStep) -> AttentionStep:
        """Return the attention of the whole step with its mask."""
        if self._mask is None:
            assert self._layout is not None
            bits = ancestor_mask(np.diff(self._layout.starts), self._layout.parents)
            self._mask = put(step.query.device, mask=bits)["mask"]
        return replace(step, tree=self._mask)

    def apart(self, step: AttentionStep) -> tuple[torch.Tensor, AttentionStep]:
        """Return the indices of the tokens of samples with branches, and their attention as a separate step."""
        if self._apart is None:
            assert self._layout is not None
            self._apart = _set_apart(self._layout, step)
        own = self._apart
        return own.tokens, replace(
            step,
            query=step.query.index_select(0, own.tokens),
            block_table=own.table,
            lengths=own.lengths,
            cu_queries=own.starts,
            longest_query=own.longest_query,
            tree=own.mask,
        )

    def move(self, tokens: IntArray, targets: IntArray) -> None:
        """Write the KV of accepted branch tokens to the slots of a chain in all layers, and forget the step.

        Args:
            tokens: indices of the branch tokens in the step, [m].
            targets: indices of the tokens whose slots they take, [m].
        """
        if len(tokens):
            assert self._slots is not None
            places = put(self._slots.device, tokens=tokens, targets=targets)
            sources, slots = self._slots[places["tokens"]], self._slots[places["targets"]]
            for lines in self._lines():
                size = lines.shape[2]
                # All are gathered before the first is written, because a slot may be both a source and a target.
                lines[:, slots // size, slots % size] = lines[:, sources // size, sources % size]
        self.begin(None)

    def _lines(self) -> list[torch.Tensor]:
        """Return the caches as views [layers, blocks, block, heads, content]."""
        known = tuple(self._caches)
        if self._viewed != known:
            caches = [cache.transpose(1, 2) for cache in self._caches.values()]
            self._viewed, self._views = known, layers_at_once(caches)
        return self._views


BRANCHES = MaskedBranches()


def layers_at_once(caches: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return views [layers, *] of caches: a single view if they are at equal distances in one piece of memory.

    vLLM allocates the KV of all layers at once, so that two launches copy tokens in all of them.
    """
    first, kinds = caches[0], {(each.dtype, each.shape, each.stride()) for each in caches}
    storages = {each.untyped_storage().data_ptr() for each in caches}
    begins = [each.storage_offset() for each in caches]
    distances = set(np.diff(begins).tolist())
    if len(kinds) > 1 or len(storages) > 1 or len(distances) != 1 or (step := distances.pop()) < 1:
        return [each.unsqueeze(0) for each in caches]
    return [first.as_strided((len(caches), *first.shape), (step, *first.stride()), begins[0])]


def _set_apart(layout: BranchLayout, step: AttentionStep) -> _Apart:
    places = np.array(sorted(layout.parents), np.int64)
    queries = np.diff(layout.starts)[places]
    trees = {row: layout.parents[place] for row, place in enumerate(places.tolist())}
    first = np.concatenate(([0], np.cumsum(queries)))
    tokens = np.repeat(layout.starts[places] - first[:-1], queries) + np.arange(first[-1])
    there = put(
        step.query.device,
        tokens=tokens,
        places=places,
        starts=first.astype(np.int32),
        mask=ancestor_mask(queries, trees),
    )
    return _Apart(
        there["tokens"],
        step.block_table.index_select(0, there["places"]),
        step.lengths.index_select(0, there["places"]),
        there["starts"],
        there["mask"],
        int(queries.max()),
    )
