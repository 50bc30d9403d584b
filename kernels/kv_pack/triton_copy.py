"""Copy between the blocks of all layers and one buffer, in one launch; see layout.BlockRuns for both layouts.

A program copies a piece of one run: a whole block of one layer, or the tokens of the partial block for one index of
the axes before them. Elements are moved as the widest integers that all runs are multiples of.
"""

# mypy: disable-error-code="no-untyped-def,import-untyped"
# Triton's functions carry types that annotations cannot say.

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kernels.kv_pack.layout import BlockRuns
from kernels.transfer import uploaded
from kernels.tuning import tuning

WIDTHS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def copy(
    kv_caches: Sequence[torch.Tensor],
    blocks: torch.Tensor,
    buffer: torch.Tensor,
    shape: BlockRuns,
    *,
    unpacking: bool,
) -> None:
    """Pack, or unpack; arguments checked by the caller."""
    if shape.elements == 0:
        return
    size = buffer.element_size()
    block_bytes, rest_bytes = shape.block_elements * size, shape.rest * shape.after * size
    pointers = [cache.data_ptr() for cache in kv_caches]
    common = math.gcd(block_bytes, rest_bytes, shape.block * shape.after * size, *pointers, buffer.data_ptr())
    width = math.gcd(common, 8)
    full_runs, rest_runs = shape.outer * shape.full, shape.outer * shape.before if shape.rest else 0
    longest = max(block_bytes if full_runs else 0, rest_bytes) // width
    piece = min(tuning(buffer.device).copy_piece, triton.next_power_of_2(longest))
    there = uploaded({"pointers": torch.tensor(pointers), "blocks": blocks.long()}, buffer.device)
    grid = (full_runs + rest_runs, triton.cdiv(longest, piece), len(kv_caches))
    _copy_runs[grid](
        there["pointers"],
        there["blocks"],
        buffer.view(WIDTHS[width]) if size >= width else _widened(buffer, width),
        full_runs, shape.full, shape.blocks, shape.before,
        block_bytes // width, rest_bytes // width,
        shape.block * shape.after * size // width, shape.elements * size // width,
        UNPACKING=unpacking, PIECE=piece, ALIGNED=common % 16 == 0,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def _widened(buffer: torch.Tensor, width: int) -> torch.Tensor:
    """Return the buffer as one vector of integers of `width` bytes; its rows need not be multiples of them."""
    return buffer.view(-1).view(torch.uint8).view(WIDTHS[width])


# Do not specialise on values of a request; only `block_units` is fixed by the model.
@triton.jit(
    do_not_specialize=["full_runs", "full", "num_blocks", "before", "rest_units", "row_units", "layer_units"]
)
def _copy_runs(
    caches, blocks, buffer, full_runs, full, num_blocks, before, block_units, rest_units, row_units, layer_units,
    UNPACKING: tl.constexpr, PIECE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    run = tl.program_id(0)
    layer = tl.program_id(2).to(tl.int64)
    # Both kinds of run are computed and one is chosen; a branch would save nothing.
    partial = run >= full_runs
    after = run - full_runs
    outer = tl.where(partial, after // before, run // tl.maximum(full, 1)).to(tl.int64)
    which = tl.where(partial, full, run % tl.maximum(full, 1))
    block = tl.load(blocks + which)
    inside = tl.where(partial, (after % before) * row_units, 0).to(tl.int64)
    there = (outer * num_blocks + block) * block_units + inside
    # cast, not to: an argument that is 1 is a constant to Triton, and no tensor.
    whole_end = tl.cast(full_runs, tl.int64) * block_units
    here = tl.where(partial, whole_end + after.to(tl.int64) * rest_units, run.to(tl.int64) * block_units)
    length = tl.where(partial, rest_units, block_units)
    offsets = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    mask = offsets < length
    cache = tl.load(caches + layer).to(buffer.dtype)
    here += layer * layer_units
    if ALIGNED:
        # Everything begins at a multiple of 16 bytes, two units: loads and stores are as wide.
        cache = tl.multiple_of(cache, 16)
        there, here = tl.multiple_of(there, 2), tl.multiple_of(here, 2)
        length = tl.multiple_of(length, 2)
        mask = offsets < length
    outside = cache + there + offsets
    packed = buffer + here + offsets
    if UNPACKING:
        tl.store(outside, tl.load(packed, mask=mask), mask=mask)
    else:
        tl.store(packed, tl.load(outside, mask=mask), mask=mask)
