"""Compute the attention of draft trees on CPU, with vLLM's kernel.

vLLM's kernel computes every step unchanged, and writes the KV of all its tokens. Its results for the tokens of
branches are wrong, because branches see earlier siblings. The same kernel computes these again, laid out as
separate samples in a copy of the blocks that they see: the blocks from a fork on are private to its branch, and
have the KV of its path at its positions. `BranchPlan` is pure.

The layout of KV within a block depends on the processor, so blocks are only copied whole, and vLLM's own function
writes single tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm import _custom_ops as ops
from vllm import envs
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from services.generation.engine.experiments.trees.attention import BranchLayout
from services.generation.engine.sampling.rows import IntArray


@dataclass(frozen=True, slots=True)
class BranchRun:
    """Segment off the primary chain, of the sample at index `place` of the batch.

    `before` counts the tokens of the context up to its path: prompt, response, and the primary chain up to the
    fork. `path` has the tokens of the step from there to the segment's end; the last `own` of them are the
    segment's.
    """

    place: int
    before: int
    path: Sequence[int]
    own: int


@dataclass(frozen=True, slots=True)
class BranchPlan:
    """Runs laid out in a copy of some blocks of KV.

    `sources` [b] are the blocks to copy. The KV of the step's `path` tokens [p] is written to `slots` [p] of the
    copies. The queries are the `own` tokens [q]; `starts` [runs + 1] divides them by run, `lengths` [runs] has the
    lengths of the contexts, queries included, and `table` [runs, *] their blocks in the copies.
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
        runs: runs of a step.
        table: blocks of each sample, [n, *].
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


class _LayerKv(NamedTuple):
    """KV of the path tokens of a step in one layer, and how to write it to the layer's cache."""

    impl: TreeCPUImpl
    layer: Any
    cache: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Prepared:
    """Plan of a step as tensors, the same for all its layers, and vLLM's schedule of it."""

    plan: BranchPlan
    sources: torch.Tensor
    path: torch.Tensor
    slots: torch.Tensor
    own: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    table: torch.Tensor
    schedule: torch.Tensor
    own_slots: torch.Tensor
    """vLLM's slots of all tokens of the step."""


class CopiedBranches:
    """Branches of the step that this process computes, in copies of blocks. There is one engine per process."""

    def __init__(self) -> None:
        self.runs: Sequence[BranchRun] = ()
        self._prepared: _Prepared | None = None
        self._kept: list[_LayerKv] = []

    def begin(self, layout: BranchLayout | None) -> None:
        """Compute these branches in the next forward pass; None for a step without branches."""
        self.runs = () if layout is None else runs_of(layout)
        self._prepared = None
        self._kept.clear()

    def computed(self) -> None:
        """End the step's forward pass: later passes have no branches, but the data for `move` is kept."""
        self.runs = ()

    def attend(
        self,
        impl: TreeCPUImpl,
        layer: Any,
        step: tuple[torch.Tensor, ...],
        metadata: Any,
        output: torch.Tensor,
    ) -> None:
        """Compute the attention of branches, and keep their KV.

        Args:
            impl: implementation of the layer.
            layer: vLLM's layer.
            step: query, key and value of all tokens, and the layer's cache, with the KV of the step in it.
            metadata: vLLM's metadata of the step.
            output: output of all tokens; the rows of branches are written.
        """
        query, key, value, cache = step
        if self._prepared is None:
            self._prepared = _prepare(self.runs, impl, layer, query, cache, metadata)
        made = self._prepared
        copy = cache.index_select(0, made.sources)
        key, value = key[made.path], value[made.path]
        impl.write(layer, key, value, copy, made.slots)
        part = torch.empty_like(output[: len(made.own)])
        keys, values = _halves(copy)
        ops.cpu_attention_with_kv_cache(
            query=query[made.own],
            key_cache=keys,
            value_cache=values,
            output=part,
            query_start_loc=made.starts,
            seq_lens=made.lengths,
            scale=impl.scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=made.table,
            softcap=impl.logits_soft_cap,
            scheduler_metadata=made.schedule,
            s_aux=impl.sinks,
        )
        output[made.own] = part
        self._kept.append(_LayerKv(impl, layer, cache, key, value))

    def move(self, tokens: IntArray, targets: IntArray) -> None:
        """Write the KV of accepted branch tokens to the slots of a chain in all layers, and forget the step.

        Args:
            tokens: indices of the branch tokens in the step, [m].
            targets: indices of the tokens whose slots they take, [m].
        """
        if len(tokens):
            made = self._prepared
            assert made is not None
            slots = made.own_slots[torch.from_numpy(targets)]
            where = {token: row for row, token in enumerate(made.plan.path.tolist())}
            rows = torch.tensor([where[token] for token in tokens.tolist()])
            for kept in self._kept:
                kept.impl.write(kept.layer, kept.key[rows], kept.value[rows], kept.cache, slots)
        self.begin(None)


STEP = CopiedBranches()


class TreeCPUImpl(CPUAttentionBackendImpl):
    """vLLM's attention on CPU, with branches computed again."""

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Do as vLLM: write `output` for the query tokens of requests, and return it."""
        scales = (output_scale, output_block_scale)
        found = super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *scales)
        if STEP.runs and attn_metadata is not None:
            STEP.attend(self, layer, (query, key, value, kv_cache), attn_metadata, output)
        return found

    def write(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Write the KV of some tokens [m, heads, size] to slots [m] of a cache."""
        ops.cpu_attn_reshape_and_cache(
            key, value, *_halves(cache), slots, layer.isa, kv_cache_dtype=self.kv_cache_dtype
        )


class TreeCPUBackend(CPUAttentionBackend):
    """vLLM's CPU_ATTN with our implementation; it keeps that name."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        """Return the implementation."""
        return TreeCPUImpl


def use_trees() -> CopiedBranches:
    """Replace vLLM's attention by this one, and return its branches. Call it before the model is built."""
    path = f"{TreeCPUBackend.__module__}.{TreeCPUBackend.__qualname__}"
    register_backend(AttentionBackendEnum.CPU_ATTN, path)
    return STEP


def _halves(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of a cache [blocks, heads, block, 2 * size] in the form of vLLM's functions."""
    blocks, heads, size, _ = cache.shape
    keys, values = cache.view(blocks, heads, 2 * size, -1).chunk(2, dim=2)
    return keys, values


def _prepare(
    runs: Sequence[BranchRun],
    impl: TreeCPUImpl,
    layer: Any,
    query: torch.Tensor,
    cache: torch.Tensor,
    metadata: Any,
) -> _Prepared:
    size = cache.shape[2]
    plan = plan_of(runs, metadata.block_table.numpy(), size)
    starts, lengths = (torch.from_numpy(each).to(torch.int32) for each in (plan.starts, plan.lengths))
    schedule = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(runs),
        num_heads=impl.num_heads,
        num_kv_heads=impl.num_kv_heads,
        head_dim=impl.head_size,
        seq_lens=lengths,
        dtype=query.dtype,
        query_start_loc=starts,
        causal=True,
        sliding_window_size=-1,
        isa=layer.isa,
        enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
        kv_cache_dtype=impl.kv_cache_dtype,
    )
    return _Prepared(
        plan,
        torch.from_numpy(plan.sources),
        torch.from_numpy(plan.path),
        torch.from_numpy(plan.slots),
        torch.from_numpy(plan.own),
        starts,
        lengths,
        torch.from_numpy(plan.table).to(torch.int32),
        schedule,
        metadata.slot_mapping,
    )
