"""A check of attention on the device at hand, for the shape of a model; the engine makes it before it serves."""

from __future__ import annotations

from dataclasses import replace

import torch

from kernels.backend import Backend, KernelMismatch
from kernels.short_query_attention.ancestor_mask import ancestor_mask
from kernels.short_query_attention.attend import attend
from kernels.short_query_attention.inputs import LONGEST_TREE, AttentionStep
from kernels.short_query_attention.reference import attend_reference

_ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""What a result may be off by, as a share of the largest one."""


def check_attention(
    device: torch.device, heads: int, kv_heads: int, size: int, dtype: torch.dtype, trees: bool = False
) -> None:
    """KernelMismatch unless attention of this shape agrees with the reference in float64 on `device`.

    Requests that decode, verify a few drafts or as many as go into a step, or have nothing to do; contexts in one
    piece and in more; KV as vLLM lays it out, NaN wherever nobody should read. With `trees` also under a mask of
    ancestors, with drafts as large as a mask has room for. Raises also what a kernel that does not compile or run
    raises.
    """
    step = _attention(heads, kv_heads, size, dtype)
    cases = [step, replace(step, window=40)]
    if trees:
        cases += [
            _with_tree(step),
            _with_tree(_attention(heads, kv_heads, size, dtype, longest=LONGEST_TREE)),
        ]
    for host in cases:
        exact = attend_reference(host, torch.float64).double()
        found = attend(_moved(host, device), backend=Backend.TRITON).cpu().double()
        if not (found - exact).abs().max() <= _ROUNDING[dtype] * exact.abs().max():
            raise KernelMismatch(
                f"attention of {heads} heads of {size} over {kv_heads} on {device} is off by more than rounding"
            )


def _attention(
    heads: int, kv_heads: int, size: int, dtype: torch.dtype, longest: int = 16, block: int = 16
) -> AttentionStep:
    """Four requests; their blocks lie in the cache in reverse."""
    generator = torch.Generator().manual_seed(0)
    lengths, queries = torch.tensor([5, 600, 0, 31 + longest]), torch.tensor([5, 1, 0, longest])
    columns = -(-int(lengths.max()) // block)
    table = torch.arange(len(lengths) * columns).flip(0).view(len(lengths), columns)
    cache = torch.randn(table.numel(), kv_heads, block, 2 * size, generator=generator)
    filled = torch.zeros(table.numel(), block, dtype=torch.bool)
    for blocks, length in zip(table, lengths.tolist(), strict=True):
        filled[blocks] = (torch.arange(columns * block) < length).view(columns, block)
    cache = cache.masked_fill(~filled[:, None, :, None], torch.nan).to(dtype)
    keys, values = cache.transpose(1, 2).split(size, dim=-1)
    return AttentionStep(
        query=torch.randn(int(queries.sum()), heads, size, generator=generator).to(dtype),
        keys=keys,
        values=values,
        block_table=table.to(torch.int32),
        lengths=lengths.to(torch.int32),
        cu_queries=torch.nn.functional.pad(queries.cumsum(0), (1, 0)).to(torch.int32),
        longest_query=int(queries.max()),
        longest=int(lengths.max()),
        scale=size**-0.5,
    )


def _with_tree(step: AttentionStep) -> AttentionStep:
    """Return the step with trees in which two tokens are the children of each."""
    queries = step.cu_queries.diff().numpy()
    trees = {
        request: [(place - 1) // 2 - 1 for place in range(1, count)]
        for request, count in enumerate(queries.tolist())
        if count
    }
    return replace(step, tree=torch.from_numpy(ancestor_mask(queries, trees)))


def _moved(step: AttentionStep, device: torch.device) -> AttentionStep:
    """Return the step on a device; keys and values stay halves of one tensor, with its strides."""
    tensors = {
        name: getattr(step, name).to(device) for name in ("query", "block_table", "lengths", "cu_queries")
    }
    size = step.query.shape[-1]
    cache = torch.cat((step.keys, step.values), dim=-1).transpose(1, 2).contiguous().to(device)
    keys, values = cache.transpose(1, 2).split(size, dim=-1)
    tree = None if step.tree is None else step.tree.to(device)
    return replace(step, keys=keys, values=values, tree=tree, **tensors)
