"""Gather the KV of a request out of its blocks into one buffer, and scatter it back.

A migration sends this buffer. The plain PyTorch reference, one gather a layer, is the path of the CPU as well.

    buffer = torch.empty(packed_shape(kv_caches, len(blocks), tokens), dtype=..., device=...)
    pack(kv_caches, blocks, buffer, tokens=tokens)
    unpack(buffer, kv_caches, blocks_there, tokens=tokens)      # elsewhere, into caches of the same layout

From a partial last block only the request's tokens are copied: no stale KV of others leaves the cache, and the rest
of the destination's block stays unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.backend import Backend, choose
from kernels.kv_pack.layout import BlockLayout, BlockRuns, check_blocks, check_buffer, check_caches, runs


def pack_reference(
    kv_caches: Sequence[torch.Tensor],
    blocks: torch.Tensor,
    out: torch.Tensor,
    layout: BlockLayout,
    shape: BlockRuns,
) -> None:
    """Copy the blocks of all layers into `out`."""
    index = blocks[: shape.full].to(out.device, torch.int64)
    for cache, row in zip(kv_caches, out, strict=True):
        whole, partial = _parts(row, cache, layout, shape)
        if shape.full:
            torch.index_select(cache, layout.block_axis, index, out=whole)
        if shape.rest:
            partial.copy_(_partial(cache, blocks, layout, shape))


def unpack_reference(
    packed: torch.Tensor,
    kv_caches: Sequence[torch.Tensor],
    blocks: torch.Tensor,
    layout: BlockLayout,
    shape: BlockRuns,
) -> None:
    """Copy `packed` into the blocks of all layers."""
    index = blocks[: shape.full].to(packed.device, torch.int64)
    for cache, row in zip(kv_caches, packed, strict=True):
        whole, partial = _parts(row, cache, layout, shape)
        if shape.full and cache.device.type == "cpu":
            # Several times faster than index_copy_, which goes element by element there.
            for place, block in enumerate(index.tolist()):
                cache.select(layout.block_axis, block).copy_(whole.select(layout.block_axis, place))
        elif shape.full:
            cache.index_copy_(layout.block_axis, index, whole)
        if shape.rest:
            _partial(cache, blocks, layout, shape).copy_(partial)


def _parts(
    row: torch.Tensor, cache: torch.Tensor, layout: BlockLayout, shape: BlockRuns
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a layer's row of the buffer as the whole blocks and the partial one, shaped like the cache's."""
    sizes = list(cache.shape)
    sizes[layout.block_axis] = shape.full
    whole = row[: shape.full_elements].view(sizes)
    del sizes[layout.block_axis]
    sizes[layout.token_axis - 1] = shape.rest
    return whole, row[shape.full_elements :].view(sizes)


def _partial(
    cache: torch.Tensor, blocks: torch.Tensor, layout: BlockLayout, shape: BlockRuns
) -> torch.Tensor:
    block = cache.select(layout.block_axis, int(blocks[shape.full]))
    return block.narrow(layout.token_axis - 1, 0, shape.rest)


def pack(
    kv_caches: Sequence[torch.Tensor],
    blocks: torch.Tensor,
    out: torch.Tensor,
    *,
    tokens: int | None = None,
    layout: BlockLayout | None = None,
    backend: Backend | str | None = None,
) -> None:
    """Copy the blocks of a request, over all layers, into one contiguous buffer.

    Args:
        kv_caches: one tensor a layer, all alike and contiguous, of any dtype; axes as `layout` says.
        blocks: [n] int32 or int64 in host memory, in the order of the tokens; none twice.
        out: [layers, elements] as `packed_shape` says; all of it is written.
        tokens: of the request; None: all blocks are full.
        layout: default [num_blocks, H, block, 2 D].
        backend: see kernels/backend.py.

    Raises:
        ValueError: anything that does not fit, a block out of range or named twice.
    """
    layout = layout or BlockLayout()
    shape = _check(kv_caches, blocks, tokens, layout, "out", out)
    if choose(out.device, backend) is Backend.TRITON:
        from kernels.kv_pack.triton_copy import copy

        copy(kv_caches, blocks, out, shape, unpacking=False)
    else:
        pack_reference(kv_caches, blocks, out, layout, shape)


def unpack(
    packed: torch.Tensor,
    kv_caches: Sequence[torch.Tensor],
    blocks: torch.Tensor,
    *,
    tokens: int | None = None,
    layout: BlockLayout | None = None,
    backend: Backend | str | None = None,
) -> None:
    """Copy a buffer that `pack` made into blocks of these caches; arguments and errors as there."""
    layout = layout or BlockLayout()
    shape = _check(kv_caches, blocks, tokens, layout, "packed", packed)
    if choose(packed.device, backend) is Backend.TRITON:
        from kernels.kv_pack.triton_copy import copy

        copy(kv_caches, blocks, packed, shape, unpacking=True)
    else:
        unpack_reference(packed, kv_caches, blocks, layout, shape)


def _check(
    kv_caches: Sequence[torch.Tensor],
    blocks: torch.Tensor,
    tokens: int | None,
    layout: BlockLayout,
    name: str,
    buffer: torch.Tensor,
) -> BlockRuns:
    check_caches(kv_caches)
    shape = runs(kv_caches[0].shape, layout, len(blocks), tokens)
    check_blocks(blocks, shape.blocks)
    check_buffer(name, buffer, (len(kv_caches), shape.elements), kv_caches[0])
    return shape
