"""Steps over random KV, laid out as vLLM lays it out: inputs for races and measurements of attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.short_query_attention.inputs import AttentionStep


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads of a model, contexts of a usual request and of a long one, and the draft tokens of one with drafts."""

    heads: int = 16
    kv_heads: int = 8
    head_size: int = 128
    context: int = 8192
    long: int = 32_768
    block: int = 16
    drafts: int = 4


def context_lengths(kind: str, shape: AttentionShape, requests: int) -> torch.Tensor:
    """Return contexts of a batch, [requests] int32: "even", "one long" among short ones, or "log-normal"."""
    if kind == "even":
        found = torch.full((requests,), shape.context)
    elif kind == "one long":
        found = torch.full((requests,), shape.context // 4)
        found[requests // 2] = shape.long
    else:
        spread = torch.randn(requests, generator=torch.Generator().manual_seed(0)).exp()
        found = (spread * (shape.context // 4)).clamp(32, shape.long)
    return found.to(torch.int32)


def random_step(
    device: torch.device,
    shape: AttentionShape,
    kind: str,
    requests: int,
    *,
    group: int | None = None,
    queries: int = 1,
    drafted: int = 0,
    order: str = "NHD",
) -> AttentionStep:
    """Return a step in bfloat16 whose blocks of KV are shuffled.

    Args:
        device: where its tensors are.
        shape: heads and lengths.
        kind: how lengths differ, as for `context_lengths`.
        requests: how many there are.
        group: query heads that share a key-value head; None: those of `shape`.
        queries: query tokens of a request.
        drafted: requests that have `shape.drafts` query tokens more.
        order: NHD, a block's tokens before its heads in memory, as vLLM has it unless told otherwise, or HND.
    """
    lengths = context_lengths(kind, shape, requests)
    counts = (lengths + shape.block - 1) // shape.block
    table = torch.zeros(requests, int(counts.max()), dtype=torch.int32)
    shuffled = torch.randperm(int(counts.sum())).to(torch.int32).split(counts.tolist())
    for row, blocks in zip(table, shuffled, strict=True):
        row[: len(blocks)] = blocks
    inner = (shape.block, shape.kv_heads) if order == "NHD" else (shape.kv_heads, shape.block)
    numbers = {"dtype": torch.bfloat16, "device": device}
    cache = torch.randn(int(counts.sum()), *inner, 2 * shape.head_size, **numbers)
    keys, values = (cache if order == "NHD" else cache.transpose(1, 2)).split(shape.head_size, dim=-1)
    each = torch.full((requests,), queries)
    each[:drafted] += shape.drafts
    cu = torch.nn.functional.pad(each.cumsum(0), (1, 0)).to(torch.int32)
    heads = shape.heads if group is None else group * shape.kv_heads
    return AttentionStep(
        query=torch.randn(int(cu[-1]), heads, shape.head_size, **numbers),
        keys=keys,
        values=values,
        block_table=table.to(device),
        lengths=lengths.to(device),
        cu_queries=cu.to(device),
        longest_query=int(each.max()),
        longest=int(lengths.max()),
        scale=shape.head_size**-0.5,
    )
