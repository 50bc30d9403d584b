"""Quantising in Triton: a program reads a few rows of one group once, and writes their words and scale.

Bit for bit the reference (weight.py): divisions are correctly rounded (div_rn), and rounding to an integer adds and
subtracts 1.5 * 2**23, which gives the nearest, ties to even, of values below 2**22.
"""

# mypy: disable-error-code="no-untyped-def,import-untyped"
# Triton's functions carry types that annotations cannot say.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton_math import narrow
from kernels.w4a16.weight import MIDDLE, PER_WORD

ROWS = 16
"""Rows of a program: 2048 weights of group 128."""
_ROUND = tl.constexpr(12582912.0)
_MIDDLE = tl.constexpr(MIDDLE)
_PER_WORD = tl.constexpr(PER_WORD)


def quantise_triton(
    weight: torch.Tensor, group: int, symmetric: bool, scale_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return packed, scales and zeros, as `quantise_reference`; the caller checks the arguments."""
    rows, columns = weight.shape
    groups, words = triton.cdiv(columns, group), triton.cdiv(columns, PER_WORD)
    packed = torch.empty(rows, words, dtype=torch.int32, device=weight.device)
    scales = torch.empty(rows, groups, dtype=scale_dtype, device=weight.device)
    zeros = None if symmetric else torch.empty(rows, groups, dtype=torch.uint8, device=weight.device)
    _quantise[(groups, triton.cdiv(rows, ROWS))](
        weight, packed, scales, scales if zeros is None else zeros,
        rows, columns, weight.stride(0), words, groups,
        SYMMETRIC=symmetric, GROUP=group, ROWS=ROWS, enable_fp_fusion=False,
    )  # fmt: skip
    return packed, scales, zeros


@triton.jit
def _round(x):
    return (x + _ROUND) - _ROUND


@triton.jit
def _quantise(
    weight, packed, scales, zeros, rows, columns, stride, words, groups,
    SYMMETRIC: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = group * GROUP + tl.arange(0, GROUP)
    inside = row < rows
    mask = inside[:, None] & (column < columns)[None, :]
    w = tl.load(weight + row[:, None] * stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    # The caller finds weights that are not finite by their scale. They are not rounded: NaN has no integer.
    finite = tl.abs(w) < float("inf")
    spoiled = tl.min(finite.to(tl.int32), axis=1) == 0
    w = tl.where(finite, w, 0.0)
    if SYMMETRIC:
        wide = tl.div_rn(tl.max(tl.abs(w), axis=1), tl.full((ROWS,), 7.5, tl.float32))
    else:
        levels = tl.full((ROWS,), 15.0, tl.float32)
        low, high = tl.minimum(tl.min(w, axis=1), 0.0), tl.maximum(tl.max(w, axis=1), 0.0)
        wide = tl.div_rn(high, levels) - tl.div_rn(low, levels)
    scale = narrow(tl.where(spoiled, float("nan"), wide), scales.dtype.element_ty)
    exact = scale.to(tl.float32)
    divisor = tl.where(exact > 0.0, exact, 1.0)
    if SYMMETRIC:
        zero = tl.full((ROWS,), _MIDDLE, tl.float32)
    else:
        zero = tl.minimum(tl.maximum(_round(tl.div_rn(-low, divisor)), 0.0), 15.0)
        tl.store(zeros + row * groups + group, zero.to(tl.uint8), mask=inside)
    tl.store(scales + row * groups + group, scale, mask=inside)
    q = _round(tl.div_rn(w, tl.broadcast_to(divisor[:, None], (ROWS, GROUP)))) + zero[:, None]
    q = tl.minimum(tl.maximum(q, 0.0), 15.0)
    # Columns behind the last stay 0 in its word, as in the reference.
    q = tl.where((exact == 0.0)[:, None], zero[:, None], q)
    q = tl.where((column < columns)[None, :], q, 0.0).to(tl.int32)
    eights = tl.reshape(q, (ROWS, GROUP // _PER_WORD, _PER_WORD))
    word = tl.sum(eights << (4 * tl.arange(0, _PER_WORD))[None, None, :], axis=2)
    place = group * (GROUP // _PER_WORD) + tl.arange(0, GROUP // _PER_WORD)
    tl.store(
        packed + row[:, None] * words + place[None, :], word, mask=inside[:, None] & (place < words)[None, :]
    )
