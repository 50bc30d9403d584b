"""Gather the KV blocks of a sample into a buffer, and scatter a buffer into blocks.

This is safe while the engine runs: the blocks are full, so no step writes to them any more, or belong to a paused
or reserved sample, which no step touches.

Blocks are always moved whole, because the layout inside a block is private to the attention kernel (the CPU
kernel interleaves tokens, so half a block cannot be addressed by its axes). Bytes after a sample's last token are
not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from kernels.kv_pack import BlockLayout, pack, packed_shape, unpack

_AXES = "BHNC"


@dataclass(frozen=True, slots=True)
class Geometry:
    """Layout of one rank's KV; both sides of a transfer must have the same.

    `layout` is the order of the axes in memory (B blocks, H heads, N tokens, C content), with all sizes except B's.
    `block_size` is in tokens; `block_bytes` counts all layers.
    """

    layers: int
    block_size: int
    block_bytes: int
    dtype: str
    layout: str


class UnsupportedCaches(Exception):
    """KV caches that cannot be moved block by block; the message says why."""


class KvStore:
    """KV caches of all layers of one rank, each a view [B, H, N, C] of vLLM's, in any order in memory."""

    def __init__(self, caches: Sequence[torch.Tensor], blocks: int, block_size: int) -> None:
        """Wrap the caches of an engine.

        Args:
            caches: one per layer.
            blocks: number of blocks by the engine's count.
            block_size: tokens per block.

        Raises:
            UnsupportedCaches: layers differ, blocks are split in the cache, or not in one piece in memory.
        """
        first = caches[0] if caches else None
        if first is None or first.ndim != len(_AXES):
            raise UnsupportedCaches("there is no KV cache of attention layers")
        if tuple(first.shape)[::2] != (blocks, block_size):
            raise UnsupportedCaches(
                f"a cache of shape {list(first.shape)} for {blocks} blocks of {block_size}"
            )
        # Larger strides first; axes with one element may be anywhere.
        order = sorted(range(first.ndim), key=lambda axis: (-first.stride(axis), axis))
        if order[0] != 0:
            raise UnsupportedCaches("blocks are not in one piece in memory")
        self._caches = [cache.permute(order) for cache in caches]
        self._layout = BlockLayout(0, order.index(2))
        try:
            elements = packed_shape(self._caches, 1, layout=self._layout)[1]
        except ValueError as error:
            raise UnsupportedCaches(str(error)) from error
        self.device = first.device
        self.geometry = Geometry(
            len(caches),
            block_size,
            len(caches) * elements * first.element_size(),
            str(first.dtype).removeprefix("torch."),
            " ".join(f"{_AXES[axis]}{'' if axis == 0 else first.shape[axis]}" for axis in order),
        )
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def nbytes(self, blocks: int) -> int:
        """Return the bytes of packed blocks."""
        return self.geometry.block_bytes * blocks

    def buffer(self, blocks: int) -> torch.Tensor:
        """Allocate 1-D host memory for `blocks` blocks, pinned if the device is CUDA."""
        cache = self._caches[0]
        return torch.empty(
            self.nbytes(blocks) // cache.element_size(),
            dtype=cache.dtype,
            pin_memory=self._stream is not None,
        )

    def gather(self, blocks: Sequence[int], out: torch.Tensor) -> memoryview:
        """Pack blocks into the beginning of a `buffer`; returns their bytes."""
        part = self._part(out, len(blocks))
        with self._own_stream():
            packed = torch.empty_like(part, device=self.device) if self._stream else part
            pack(self._caches, torch.tensor(blocks), packed, layout=self._layout)
            if self._stream is not None:
                part.copy_(packed, non_blocking=True)
                self._stream.synchronize()
        return _as_bytes(part)

    def view(self, out: torch.Tensor, blocks: int) -> memoryview:
        """Return the part of a `buffer` that must hold the bytes for `scatter`."""
        return _as_bytes(self._part(out, blocks))

    def scatter(self, blocks: Sequence[int], packed: torch.Tensor) -> None:
        """Unpack the beginning of a `buffer` into blocks."""
        part = self._part(packed, len(blocks))
        with self._own_stream():
            if self._stream is not None:
                part = part.to(self.device, non_blocking=True)
            unpack(part, self._caches, torch.tensor(blocks), layout=self._layout)
            if self._stream is not None:
                self._stream.synchronize()

    def _part(self, buffer: torch.Tensor, blocks: int) -> torch.Tensor:
        shape = packed_shape(self._caches, blocks, layout=self._layout)
        return buffer[: shape[0] * shape[1]].view(shape)

    def _own_stream(self) -> AbstractContextManager[object]:
        """Return a context with a separate CUDA stream, so that no engine step waits for copies."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def _as_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the host."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())
