"""Speed of gathering and scattering KV blocks, beside this machine's memcpy."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.kv_pack import pack, packed_shape, unpack

# Qwen3-8B on CPU: 36 layers of [blocks, 8 heads, 128 tokens, 2 * 128 values], 144 KiB a token.
_LAYERS, _HEADS, _BLOCK, _VALUES = 36, 8, 128, 256
_CACHE_BLOCKS, _SAMPLE_BLOCKS = 12, 6


@dataclass(frozen=True, slots=True)
class CopyRates:
    """Bytes a second."""

    gather: float
    scatter: float
    memcpy: float

    @property
    def of_memcpy(self) -> float:
        """The slower of gathering and scattering, as a share of copying the same bytes in one piece."""
        return min(self.gather, self.scatter) / self.memcpy


def measure_copies(rounds: int = 16) -> CopyRates:
    """Return the best of some rounds each, in turn, for one sample of Qwen3-8B's shape."""
    shape = (_CACHE_BLOCKS, _HEADS, _BLOCK, _VALUES)
    caches = [torch.ones(shape, dtype=torch.bfloat16) for _ in range(_LAYERS)]
    # Not in a row: a sample's blocks lie anywhere.
    blocks = torch.arange(_SAMPLE_BLOCKS) * 2 % _CACHE_BLOCKS
    buffer = torch.empty(packed_shape(caches, len(blocks)), dtype=torch.bfloat16)
    other = torch.empty_like(buffer)
    jobs: dict[str, Callable[[], object]] = {
        "gather": lambda: pack(caches, blocks, buffer),
        "scatter": lambda: unpack(buffer, caches, blocks),
        "memcpy": lambda: other.copy_(buffer),
    }
    best = dict.fromkeys(jobs, float("inf"))
    for _ in range(rounds + 1):  # the first one touches the memory
        for name, job in jobs.items():
            began = time.perf_counter()
            job()
            best[name] = min(best[name], time.perf_counter() - began)
    nbytes = buffer.numel() * buffer.element_size()
    return CopyRates(**{name: nbytes / seconds for name, seconds in best.items()})
