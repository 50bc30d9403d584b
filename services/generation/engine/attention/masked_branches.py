"""Draft trees by our short-query kernel, which takes a mask of ancestors (CUDA).

The KV of a step lies in the slots of its list of tokens. A short step, one that our kernel computes, gets the mask
of its tokens. A step with a longer query in it is computed by vLLM's kernel, which knows no mask; the samples with
branches are then computed again, as a step of their own over their rows of the block table. Both happen in forward
passes whose attention Python launches: vLLM's graphs of whole steps are of plain decoding (tree_rules.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from kernels.short_query_attention import AttentionStep
from kernels.short_query_attention.ancestor_mask import ancestor_mask
from services.generation.engine.attention.branches import BranchLayout
from services.generation.engine.sampling.rows import IntArray, put


@dataclass(frozen=True, slots=True)
class _Apart:
    """Samples with branches as a step of their own; `tokens` are their places in the whole step."""

    tokens: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor
    starts: torch.Tensor
    mask: torch.Tensor
    longest_query: int


class MaskedBranches:
    """Branches of the step that this process computes: one, because there is one engine a process.

    Tensors of a step are made by the first layer that asks for them. Nothing waits for the device.
    """

    def __init__(self) -> None:
        self.wanted = False
        """Steps with branches may come, so the kernels for them are compiled with the others."""
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
        """Let the next forward pass compute these branches; None for a step without any."""
        self._layout, self._mask, self._apart, self._slots = layout, None, None, None
        self._caches.clear()

    def computed(self) -> None:
        """Let other forward passes than that of the step be plain; what is kept of it stays."""
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
        """Return the places of the tokens of samples with branches, and their attention as a step of its own."""
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
        """Write KV of accepted branch tokens to the slots of others in all layers, and forget the step.

        Args:
            tokens: places in the step, [m].
            targets: places of the tokens whose slots they take, [m].
        """
        if len(tokens):
            assert self._slots is not None
            places = put(self._slots.device, tokens=tokens, targets=targets)
            sources, slots = self._slots[places["tokens"]], self._slots[places["targets"]]
            for lines in self._lines():
                size = lines.shape[2]
                # All are gathered before the first is written: a slot may be both a source and a target.
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
    """Return views [layers, *] of caches: one of all if they lie at even distances in one piece of memory.

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
