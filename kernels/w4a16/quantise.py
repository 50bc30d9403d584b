"""Round a weight matrix to 4 bits: fast enough to be done at every weight update."""

from __future__ import annotations

import torch

from kernels.backend import Backend, choose
from kernels.checks import FLOATS, check, check_contiguous
from kernels.w4a16.reference import quantise_reference
from kernels.w4a16.weight import W4Weight, check_group


def quantise(
    weight: torch.Tensor,
    group: int = 128,
    *,
    symmetric: bool = True,
    scale_dtype: torch.dtype | None = None,
    backend: Backend | str | None = None,
) -> W4Weight:
    """Round to nearest, a scale (and, not symmetric, a zero point) for every `group` columns of a row.

    Args:
        weight: [N, K] float32, bfloat16 or float16, the last axis contiguous; a row per output.
        group: 32, 64, 128 or 256.
        symmetric: whether 0 is the middle of the range; reference.py has both formulas.
        scale_dtype: of the scales; default: the weight's.
        backend: see kernels/backend.py.

    Raises:
        ValueError: a shape, dtype or group that is not allowed, or a weight that is not finite, or so large that
            its scale is not.
    """
    check("weight", weight, (None, None), FLOATS)
    check_group(group)
    check_contiguous(weight=weight)
    if 0 in weight.shape:
        raise ValueError(f"weight must have at least one row and column, got {list(weight.shape)}")
    scale_dtype = scale_dtype or weight.dtype
    if scale_dtype not in FLOATS:
        raise ValueError(f"scale_dtype must be float32, bfloat16 or float16, got {scale_dtype}")
    packed, scales, zeros = _quantise(weight, group, symmetric, scale_dtype, backend)
    if not torch.isfinite(scales).all():
        raise ValueError("weight must be finite, and its scales within scale_dtype")
    return W4Weight(packed, scales, zeros, weight.shape[1], group)


def _quantise(
    weight: torch.Tensor, group: int, symmetric: bool, scale_dtype: torch.dtype, backend: Backend | str | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    if choose(weight.device, backend) is Backend.TRITON:
        from kernels.w4a16.triton_quantise import quantise_triton

        return quantise_triton(weight, group, symmetric, scale_dtype)
    return quantise_reference(weight, group, symmetric, scale_dtype)
