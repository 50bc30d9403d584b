"""Activations times a 4-bit weight, in plain PyTorch: for what vLLM's Marlin and Machete do not take.

There is no kernel of ours for this product. The engine gives 16-bit activations to vLLM's Machete or Marlin, whose
layouts are made for the tensor cores; ours, which unpacked words in the order of the format, was estimated at 20 to
30 % of the bound, and was left with float32 activations, which no drafting on a GPU has.
"""

from __future__ import annotations

import torch

from kernels.checks import FLOATS, check, check_contiguous, check_device
from kernels.w4a16.reference import matmul_reference
from kernels.w4a16.weight import W4Weight


def matmul(x: torch.Tensor, weight: W4Weight) -> torch.Tensor:
    """x [M, K] times the transposed weight [N, K]: [M, N], computed in float32, in x's dtype.

    x is float32, bfloat16 or float16 with a contiguous last axis; M = 0 is allowed. The weight is unpacked for the
    call, so this needs memory for 4 bytes a weight.

    ValueError for a shape, dtype or device that does not fit.
    """
    check("x", x, (None, weight.columns), FLOATS)
    check_contiguous(x=x)
    check_device(x.device, weight=weight.packed)
    return matmul_reference(x, weight)
