"""Packing in plain PyTorch: one gather a layer, straight into the buffer. It is the CPU's path as well."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.kv_pack.layout import BlockLayout, BlockRuns


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
