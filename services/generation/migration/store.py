"""The KV of one rank as bytes: gathers the blocks of a sample into a buffer, and scatters a buffer into blocks.

Works beside the engine: the blocks are a sample's whole ones, which no step writes to any more, or belong to a
frozen or a reserved sample, which no step touches at all.

Blocks always travel whole: how the tokens lie in one is the attention kernel's affair (the CPU's interleaves them,
so half a block cannot be told from its axes). What lies behind a sample's last token is never read.
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
    """Of a rank's KV. Bytes and shapes must be the same on both sides for a block to mean the same.

    `layout` is the order of the axes in memory (B blocks, H heads, N tokens, C content) and their sizes but B's.
    """

    layers: int
    block_size: int
    block_bytes: int
    dtype: str
    layout: str


class UnsupportedCaches(Exception):
    """KV that cannot be moved block by block; says why."""


class KvStore:
    """The caches of all layers of one rank, each a view [B, H, N, C] of vLLM's, in whatever order in memory."""

    def __init__(self, caches: Sequence[torch.Tensor], blocks: int, block_size: int) -> None:
        """
        Args:
            caches: one a layer.
            blocks: that the engine counts.
            block_size: tokens in one.

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
        # Larger strides come first; of axes with one element the order does not matter.
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
        """Of so many blocks, packed."""
        return self.geometry.block_bytes * blocks

    def buffer(self, blocks: int) -> torch.Tensor:
        """Host memory for the KV of so many blocks, pinned where the device copies faster from it; 1-D."""
        cache = self._caches[0]
        return torch.empty(
            self.nbytes(blocks) // cache.element_size(),
            dtype=cache.dtype,
            pin_memory=self._stream is not None,
        )

    def gather(self, blocks: Sequence[int], out: torch.Tensor) -> memoryview:
        """Pack blocks into the beginning of a `buffer`; the bytes."""
        part = self._part(out, len(blocks))
        with self._beside():
            packed = torch.empty_like(part, device=self.device) if self._stream else part
            pack(self._caches, torch.tensor(blocks), packed, layout=self._layout)
            if self._stream is not None:
                part.copy_(packed, non_blocking=True)
                self._stream.synchronize()
        return _as_bytes(part)

    def view(self, out: torch.Tensor, blocks: int) -> memoryview:
        """Where in a `buffer` the bytes have to be that `scatter` takes."""
        return _as_bytes(self._part(out, blocks))

    def scatter(self, blocks: Sequence[int], packed: torch.Tensor) -> None:
        """Unpack the beginning of a `buffer` into blocks."""
        part = self._part(packed, len(blocks))
        with self._beside():
            if self._stream is not None:
                part = part.to(self.device, non_blocking=True)
            unpack(part, self._caches, torch.tensor(blocks), layout=self._layout)
            if self._stream is not None:
                self._stream.synchronize()

    def _part(self, buffer: torch.Tensor, blocks: int) -> torch.Tensor:
        shape = packed_shape(self._caches, blocks, layout=self._layout)
        return buffer[: shape[0] * shape[1]].view(shape)

    def _beside(self) -> AbstractContextManager[object]:
        """On CUDA a stream of its own, so that no step waits."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def _as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())
