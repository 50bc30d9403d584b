"""Activations times a 4-bit weight."""

from __future__ import annotations

import torch

from kernels.backend import Backend, choose
from kernels.checks import FLOATS, check, check_contiguous, check_device
from kernels.w4a16.reference import dequantise, matmul_reference
from kernels.w4a16.weight import W4Weight

SMALL_BATCH = 64
"""Most rows for which reading 4-bit weights is what the time goes into, and which the kernel takes."""


def matmul(x: torch.Tensor, weight: W4Weight, *, backend: Backend | str | None = None) -> torch.Tensor:
    """x [M, K] times the transposed weight [N, K]: [M, N], summed in float32, in x's dtype.

    x is float32, bfloat16 or float16 with a contiguous last axis. Above 64 rows the Triton backend dequantises the
    weight to x's dtype and leaves the product to torch; M = 0 is allowed. `backend`: see kernels/backend.py.

    ValueError for a shape, dtype or device that does not fit.
    """
    check("x", x, (None, weight.columns), FLOATS)
    check_contiguous(x=x)
    check_device(x.device, weight=weight.packed)
    if len(x) == 0:
        return x.new_empty(0, weight.rows)
    if choose(x.device, backend) is Backend.REFERENCE:
        return matmul_reference(x, weight)
    if len(x) > SMALL_BATCH:
        return x @ dequantise(weight, x.dtype).T
    from kernels.w4a16.triton_matmul import matmul_triton

    return matmul_triton(x, weight)
