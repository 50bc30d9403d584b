"""Layout of blocks and tokens in a KV cache, and the number of elements of a packed request."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.backend import INTEGERS


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Axes of a layer's cache: of the blocks, and, behind it, of the tokens in a block.

    vLLM on CPU has [num_blocks, H, block, 2 D]: axes 0 and 2, the default. On CUDA it depends on the attention
    backend: [2, num_blocks, block, H, D] is 1 and 2, [num_blocks, 2, block, H, D] is 0 and 2. A cache whose strides
    are permuted is to be passed as the permuted view that is contiguous.
    """

    block_axis: int = 0
    token_axis: int = 2

    def __post_init__(self) -> None:
        if not 0 <= self.block_axis < self.token_axis:
            raise ValueError(
                "layout must have 0 <= block_axis < token_axis, got "
                f"block_axis {self.block_axis}, token_axis {self.token_axis}"
            )


@dataclass(frozen=True, slots=True)
class BlockRuns:
    """A packed request, in elements of the cache: per layer `full` whole blocks, then `rest` tokens of one more.

    A layer's cache is [outer, blocks, before, block, after], flat; the whole blocks are packed as [outer, full,
    before, block, after], the partial one behind them as [outer, before, rest, after].
    """

    outer: int
    blocks: int
    before: int
    block: int
    after: int
    full: int
    rest: int

    @property
    def block_elements(self) -> int:
        """Elements of one block, for one index of the outer axes."""
        return self.before * self.block * self.after

    @property
    def full_elements(self) -> int:
        """Elements of the whole blocks of a layer."""
        return self.outer * self.full * self.block_elements

    @property
    def elements(self) -> int:
        """Elements of a layer."""
        return self.full_elements + self.outer * self.before * self.rest * self.after


def runs(shape: Sequence[int], layout: BlockLayout, count: int, tokens: int | None) -> BlockRuns:
    """Return the runs of `count` blocks that hold `tokens` tokens (None: all full) in caches of a shape.

    ValueError if the layout does not fit the shape, or the tokens do not need exactly these blocks.
    """
    if len(shape) <= layout.token_axis:
        raise ValueError(f"kv_caches must have more than {layout.token_axis} axes, got {list(shape)}")
    block = shape[layout.token_axis]
    tokens = count * block if tokens is None else tokens
    if not (count - 1) * block < tokens <= count * block:
        raise ValueError(
            f"tokens must be in {max(0, (count - 1) * block + 1)}..{count * block} for {count} blocks of {block}, "
            f"got {tokens}"
        )
    return BlockRuns(
        outer=math.prod(shape[: layout.block_axis]),
        blocks=shape[layout.block_axis],
        before=math.prod(shape[layout.block_axis + 1 : layout.token_axis]),
        block=block,
        after=math.prod(shape[layout.token_axis + 1 :]),
        full=tokens // block,
        rest=tokens % block,
    )


def packed_shape(
    kv_caches: Sequence[torch.Tensor],
    count: int,
    tokens: int | None = None,
    layout: BlockLayout | None = None,
) -> tuple[int, int]:
    """Shape of the buffer for `count` blocks with `tokens` tokens: [layers, elements of a layer]."""
    check_caches(kv_caches)
    return len(kv_caches), runs(kv_caches[0].shape, layout or BlockLayout(), count, tokens).elements


def check_caches(kv_caches: Sequence[torch.Tensor]) -> None:
    """ValueError unless there is a layer, and all are contiguous, alike, and on one device."""
    if not kv_caches:
        raise ValueError("kv_caches must have at least one layer")
    first = kv_caches[0]
    for index, cache in enumerate(kv_caches):
        if cache.shape != first.shape or cache.dtype != first.dtype or cache.device != first.device:
            raise ValueError(
                f"kv_caches must be alike: layer 0 is {list(first.shape)} {first.dtype} on {first.device}, "
                f"layer {index} is {list(cache.shape)} {cache.dtype} on {cache.device}"
            )
        if not cache.is_contiguous():
            raise ValueError(
                f"kv_caches must be contiguous, layer {index} has strides {list(cache.stride())}"
            )


def check_blocks(blocks: torch.Tensor, available: int) -> None:
    """ValueError unless `blocks` is [n] int32 or int64 in host memory, within range and without repetition."""
    if blocks.ndim != 1 or blocks.dtype not in INTEGERS or blocks.device.type != "cpu":
        raise ValueError(
            "blocks must be a vector of int32 or int64 in host memory, got "
            f"{list(blocks.shape)} {blocks.dtype} on {blocks.device}"
        )
    if len(blocks) == 0:
        return
    low, high = int(blocks.min()), int(blocks.max())
    if low < 0 or high >= available:
        raise ValueError(f"blocks must be in 0..{available - 1}, got {low}..{high}")
    if len(blocks.unique()) != len(blocks):
        raise ValueError("blocks must not name a block twice")


def check_buffer(name: str, buffer: torch.Tensor, shape: tuple[int, int], cache: torch.Tensor) -> None:
    """ValueError unless the buffer has the packed shape, is contiguous, and has the caches' dtype and device."""
    if tuple(buffer.shape) != shape or buffer.dtype != cache.dtype or buffer.device != cache.device:
        raise ValueError(
            f"{name} must be {list(shape)} {cache.dtype} on {cache.device}, "
            f"got {list(buffer.shape)} {buffer.dtype} on {buffer.device}"
        )
    if not buffer.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {list(buffer.stride())}")
