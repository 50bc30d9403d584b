"""Measure Philox alone: the words a second that the device draws, which bounds a sampler that needs them all."""

# mypy: disable-error-code="no-untyped-def,import-untyped"
# The types of Triton's functions cannot be expressed as annotations.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.coupled_sampler.noise import Domain
from kernels.coupled_sampler.triton_noise import gumbel_of, words_of

_BLOCK = 1024
_BLOCKS_EACH = 8


def draw_words(device: torch.device, count: int, wide: bool) -> torch.Tensor:
    """Draw `count` words, and keep the largest of every 8,192: [count / 8192] int64."""
    programs = triton.cdiv(count, _BLOCK * _BLOCKS_EACH)
    out = torch.empty(programs, dtype=torch.int64, device=device)
    _largest[(programs,)](
        out,
        int(Domain.TOKEN),
        BLOCK=_BLOCK,
        BLOCKS=_BLOCKS_EACH,
        WIDE=wide,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out


def noise_of(seed: int, position: int, count: int, device: torch.device, wide: bool) -> torch.Tensor:
    """Return g of the first `count` tokens, a multiple of 1,024: [count] float32."""
    out = torch.empty(count, dtype=torch.float32, device=device)
    key = torch.tensor([seed, position], dtype=torch.int64, device=device)
    _noise[(count // _BLOCK,)](
        key, out, int(Domain.TOKEN), BLOCK=_BLOCK, WIDE=wide, num_warps=4, enable_fp_fusion=False
    )
    return out


@triton.jit
def _largest(out, domain, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, WIDE: tl.constexpr):
    seed = tl.program_id(0).to(tl.uint64)
    largest = tl.zeros((BLOCK // 4,), tl.uint32)
    for block in range(BLOCKS):
        w0, w1, w2, w3 = words_of(seed, seed.to(tl.int64), domain, block * BLOCK, BLOCK, WIDE)
        largest = tl.maximum(largest, tl.maximum(tl.maximum(w0, w1), tl.maximum(w2, w3)))
    tl.store(out + tl.program_id(0), tl.max(largest, axis=0).to(tl.int64))


@triton.jit
def _noise(key, out, domain, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    first = tl.program_id(0) * BLOCK
    seed = tl.load(key).to(tl.uint64, bitcast=True)
    w0, w1, w2, w3 = words_of(seed, tl.load(key + 1), domain, first, BLOCK, WIDE)
    place = out + first + 4 * tl.arange(0, BLOCK // 4)
    tl.store(place, gumbel_of(w0))
    tl.store(place + 1, gumbel_of(w1))
    tl.store(place + 2, gumbel_of(w2))
    tl.store(place + 3, gumbel_of(w3))
