"""Launches of the entry functions in the settings that an engine meets, on tensors without contents.

For compiling without a device: nothing here may run, for memory is not initialised.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from kernels.coupled_sampler.proposals import RowProposals
from kernels.coupled_sampler.sample import Edited, sample
from kernels.short_query_attention import AttentionStep

WIDTH = 151_936


def draw(
    rows: int,
    width: int = WIDTH,
    dtype: torch.dtype = torch.bfloat16,
    drafts: int = 0,
    *,
    masked: bool = False,
    edited: bool = False,
    proposing: bool = False,
) -> None:
    """Sample `rows` rows, of which the last request has `drafts` + 1."""
    cu = torch.tensor([*range(rows - drafts), rows])
    count = len(cu) - 1
    ids = torch.zeros(count, dtype=torch.int64)
    more: dict[str, Any] = {}
    if masked:
        more = {"top_k": ids, "top_p": torch.ones(count), "min_p": torch.ones(count)}
    if edited:
        more["edited"] = Edited(torch.arange(1), torch.empty(1, width))
    if proposing:
        none = torch.zeros(rows, dtype=torch.bool)
        tokens = torch.zeros(rows, dtype=torch.int64)
        more["proposals"] = RowProposals(tokens, torch.zeros(rows), none, none[:count])
    sample(
        torch.empty(rows, width, dtype=dtype), ids, ids, torch.ones(count), ids.new_zeros(drafts), cu,
        backend="triton", **more,
    )  # fmt: skip


def attention_step(
    queries: list[int],
    group: int,
    kv_heads: int = 8,
    size: int = 128,
    window: int | None = None,
    *,
    tree: bool = False,
    longest: int = 5,
) -> AttentionStep:
    """Return a step of requests with so many query tokens."""
    cu = torch.tensor([0, *queries]).cumsum(0).to(torch.int32)
    cache = torch.zeros(9, 16, kv_heads, 2 * size, dtype=torch.bfloat16)
    keys, values = cache.split(size, dim=-1)
    return AttentionStep(
        query=torch.zeros(int(cu[-1]), group * kv_heads, size, dtype=torch.bfloat16),
        keys=keys,
        values=values,
        block_table=torch.zeros(len(queries), 64, dtype=torch.int32),
        lengths=torch.zeros(len(queries), dtype=torch.int32),
        cu_queries=cu,
        longest_query=longest,
        longest=1024,
        scale=0.1,
        window=window,
        tree=torch.zeros(int(cu[-1]), dtype=torch.int64) if tree else None,
    )


def attending(group: int, longest: int) -> None:
    """Attend with groups of so many heads, and queries up to so many tokens."""
    from kernels.short_query_attention.triton_attend import attend_triton

    attend_triton(attention_step([longest] * 4, group, longest=longest))


def losing() -> None:
    """Compute the distillation loss, forwards and backwards."""
    from kernels.kd_loss.triton_kd import FusedLoss

    student = torch.empty(3, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    FusedLoss.apply(student, student.detach(), torch.ones(3), 1.0).sum().backward()  # type: ignore[no-untyped-call]


def rounding() -> None:
    """Round a matrix to 4 bits."""
    from kernels.w4a16.triton_quantise import quantise_triton

    quantise_triton(torch.zeros(256, 1024, dtype=torch.bfloat16), 128, False, torch.bfloat16)


def copying() -> None:
    """Pack the blocks of a request."""
    from kernels.kv_pack.layout import BlockLayout, runs
    from kernels.kv_pack.triton_copy import copy

    caches = [torch.zeros(9, 2, 16, 256, dtype=torch.bfloat16)] * 2
    shape = runs(caches[0].shape, BlockLayout(), 3, 40)
    buffer = torch.empty(len(caches), shape.elements, dtype=torch.bfloat16)
    copy(caches, torch.tensor([3, 1, 2]), buffer, shape, unpacking=False)


LAUNCHES: dict[str, Callable[[], None]] = {
    "plain": partial(draw, 4, drafts=2),
    "masks": partial(draw, 4, drafts=2, masked=True),
    "edited rows": partial(draw, 4, drafts=2, edited=True),
    "proposals": partial(draw, 4, drafts=2, proposing=True),
    "proposals, masks, edited rows": partial(draw, 4, drafts=2, masked=True, edited=True, proposing=True),
    "groups of 2, decoding": partial(attending, 2, 1),
    "groups of 4, 4 drafts": partial(attending, 4, 5),
    "groups of 8, 15 drafts": partial(attending, 8, 16),
    "loss": losing,
    "rounding": rounding,
    "copies": copying,
}
