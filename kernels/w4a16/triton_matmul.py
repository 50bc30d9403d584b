"""A few rows times a 4-bit matrix in Triton: the weight is read once, as 4 bits, and never written wider.

A program makes BLOCK_N outputs of all rows. For each piece of columns it unpacks the integers q - zero, which
16-bit floats hold exactly, multiplies on the tensor cores and scales the float32 partial sums: the scale is applied
to rows x outputs, not to the weights, and rounds nothing. Few outputs are split along the columns over several
programs, whose float32 sums are added by a second kernel in a fixed order, so the result does not vary.
"""

# mypy: disable-error-code="no-untyped-def,import-untyped"
# Triton's functions carry types that annotations cannot say.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton_math import dot, narrow
from kernels.w4a16.weight import MIDDLE, PER_WORD, W4Weight

MOST_ROWS = 64
BLOCK_N = 64
PIECE = 128
"""Most columns in a step: 64 bytes of each weight row."""
PROGRAMS_WANTED = 264
"""Two for each multiprocessor of a large GPU; fewer outputs than that are split along the columns."""
_MIDDLE = tl.constexpr(MIDDLE)
_PER_WORD = tl.constexpr(PER_WORD)


def matmul_triton(x: torch.Tensor, weight: W4Weight, programs_wanted: int = PROGRAMS_WANTED) -> torch.Tensor:
    """x [M, K] times the transposed weight: [M, N]; 1 <= M <= 64, arguments checked by the caller."""
    m, n = x.shape[0], weight.rows
    piece = min(PIECE, weight.group)
    pieces, tiles = triton.cdiv(weight.columns, piece), triton.cdiv(n, BLOCK_N)
    splits = max(1, min(programs_wanted // tiles, pieces // 4))
    per_split = triton.cdiv(pieces, splits)
    splits = triton.cdiv(pieces, per_split)
    out = torch.empty(m, n, dtype=x.dtype, device=x.device)
    sums = out if splits == 1 else torch.empty(splits, m, n, dtype=torch.float32, device=x.device)
    asymmetric = weight.zeros is not None
    _matmul[(tiles, splits)](
        x, weight.packed, weight.scales, weight.zeros if asymmetric else weight.scales, sums,
        m, n, weight.columns, x.stride(0), weight.packed.stride(0), weight.scales.stride(0), per_split,
        ASYMMETRIC=asymmetric, GROUP=weight.group, PIECE=piece,
        BLOCK_M=max(16, triton.next_power_of_2(m)), BLOCK_N=BLOCK_N,
        num_warps=4, num_stages=2 if x.dtype == torch.float32 else 4, enable_fp_fusion=True,
    )  # fmt: skip
    if splits > 1:
        _add[(triton.cdiv(m * n, 1024),)](sums, out, m * n, splits, BLOCK=1024, enable_fp_fusion=True)
    return out


@triton.jit
def _matmul(
    x, packed, scales, zeros, out, m, n, columns, x_stride, word_stride, scale_stride, per_split,
    ASYMMETRIC: tl.constexpr, GROUP: tl.constexpr, PIECE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, BLOCK_M)
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    here = output < n
    wide = output.to(tl.int64)
    shifts = (4 * tl.arange(0, _PER_WORD))[None, None, :]
    words = tl.cdiv(columns, _PER_WORD)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    first = split * per_split
    for piece in range(first, tl.minimum(first + per_split, tl.cdiv(columns, PIECE))):
        start = piece * PIECE
        word = start // _PER_WORD + tl.arange(0, PIECE // _PER_WORD)
        w = tl.load(
            packed + wide[:, None] * word_stride + word[None, :],
            mask=here[:, None] & (word < words)[None, :],
            other=0,
        )
        q = tl.reshape((w[:, :, None] >> shifts) & 15, (BLOCK_N, PIECE))
        column = start + tl.arange(0, PIECE)
        a = tl.load(
            x + row[:, None] * x_stride + column[None, :],
            mask=(row < m)[:, None] & (column < columns)[None, :],
            other=0.0,
        )
        place = wide * scale_stride + start // GROUP
        if ASYMMETRIC:
            q -= tl.load(zeros + place, mask=here, other=0).to(tl.int32)[:, None]
        else:
            q -= _MIDDLE
        scale = tl.load(scales + place, mask=here, other=0.0).to(tl.float32)
        # By way of float32: the interpreter knows no other way from integers to bfloat16.
        part = dot(a, tl.trans(q.to(tl.float32).to(a.dtype)))
        acc += part * scale[None, :]
    target = out + split.to(tl.int64) * m * n + row.to(tl.int64)[:, None] * n + output[None, :]
    tl.store(target, narrow(acc, out.dtype.element_ty), mask=(row < m)[:, None] & here[None, :])


@triton.jit
def _add(sums, out, elements, splits, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < elements
    total = tl.zeros((BLOCK,), tl.float32)
    for _ in range(splits):
        total += tl.load(sums + offset, mask=mask, other=0.0)
        sums += elements
    tl.store(out + offset, narrow(total, out.dtype.element_ty), mask=mask)
