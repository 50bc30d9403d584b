"""Attention of a step whose requests decode a token or verify a few drafts, and its plain reference."""

from __future__ import annotations

import torch

from kernels.backend import Backend, choose
from kernels.short_query_attention.inputs import AttentionStep


def attend_reference(step: AttentionStep, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return [T, Hq, D] in the query's dtype, computed in `dtype`; zeros for a query token that sees nothing."""
    out = torch.zeros_like(step.query)
    block = step.keys.shape[1]
    starts, lengths = step.cu_queries.tolist(), step.lengths.tolist()
    for n, length in enumerate(lengths):
        first, end = starts[n], starts[n + 1]
        if first == end:
            continue
        visible = _visible(step, first, end, length)
        # Positions that no query sees are not read: a window's old blocks may be gone.
        begin = int(visible.any(dim=0).int().argmax())
        position = torch.arange(begin, length, device=step.query.device)
        blocks = step.block_table[n].long()[position // block]
        keys, values = (cache[blocks, position % block].to(dtype) for cache in (step.keys, step.values))
        query = step.query[first:end].to(dtype).unflatten(1, (-1, step.group))
        scores = torch.einsum("lhgd,shd->hgls", query, keys) * step.scale
        scores = scores.masked_fill(~visible[:, begin:], -torch.inf)
        weights = scores.softmax(dim=-1).nan_to_num(0.0)
        out[first:end] = torch.einsum("hgls,shd->lhgd", weights, values).flatten(1, 2).to(out.dtype)
    return out


def _visible(step: AttentionStep, first: int, end: int, length: int) -> torch.Tensor:
    """Return the mask of positions that each query token of a request sees, [query tokens, length]."""
    device = step.query.device
    queries = end - first
    position = torch.arange(length, device=device)
    own = torch.arange(length - queries, length, device=device).unsqueeze(1)
    if step.tree is not None:
        bits = step.tree[first:end].unsqueeze(1) >> torch.arange(queries, device=device) & 1
        before = torch.ones(queries, length - queries, dtype=torch.bool, device=device)
        return torch.cat((before, bits.bool()), dim=1)
    visible = position <= own
    return visible if step.window is None else visible & (position > own - step.window)


def attend(step: AttentionStep, *, backend: Backend | str | None = None) -> torch.Tensor:
    """Return softmax(scale * q k) v over the positions that each query token sees: [T, Hq, D] in query's dtype.

    Sums are float32. The lengths of all requests decide where contexts are cut into parts that are summed up, and
    so how a result is rounded, and nothing else of it. `backend`: see kernels/backend.py.

    ValueError for inputs that do not fit (see AttentionStep). Values in device memory are trusted, but for
    positions outside the block table, which are not read.
    """
    step.check()
    if choose(step.query.device, backend) is Backend.REFERENCE:
        return attend_reference(step)
    from kernels.short_query_attention.triton_attend import attend_triton

    return attend_triton(step)
