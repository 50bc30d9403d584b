"""Round a weight matrix to 4 bits, and multiply activations with it.

Rounding is fast enough for every weight update.

The engine gives 16-bit activations to vLLM's Machete or Marlin, whose layouts are made for the tensor cores.
`matmul`, in plain PyTorch, is for cases that these do not support. There is no Triton kernel for the product: one
that unpacked words in the order of the format was estimated at 20 to 30 % of the bound, and would only serve
float32 activations, which no drafting on a GPU has. On a CPU `matmul_cpu` uses torch's kernel, which unpacks in
registers. It rounds the activations to bfloat16: its float32 form is plain code, a hundred times as slow. `for_cpu`
lays the weight out for it once, after each quantising.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.backend import FLOATS, Backend, check, check_contiguous, check_device, choose
from kernels.w4a16.weight import MIDDLE, W4Weight, check_group, matmul_reference, quantise_reference, unpack


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
        symmetric: whether 0 is the middle of the range; `quantise_reference` has both formulas.
        scale_dtype: dtype of the scales; default: the weight's.
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


SCALES = torch.bfloat16
"""Dtype of the scales that a weight for this product must have."""
_ROWS = 16


@dataclass(frozen=True, slots=True)
class CpuW4Weight:
    """[N, K] in the layout of torch's kernel.

    packed  [N, K / 2] uint8
    scales  [K / group, N, 2] bfloat16: the scale, and what an integer of 8 stands for
    """

    packed: torch.Tensor
    scales: torch.Tensor
    group: int

    @property
    def nbytes(self) -> int:
        """Memory of the weight in bytes."""
        return sum(each.numel() * each.element_size() for each in (self.packed, self.scales))


def fits(rows: int, columns: int, group: int) -> bool:
    """Return True if torch's kernel takes a weight of this shape."""
    return rows % _ROWS == 0 and columns % group == 0


def for_cpu(weight: W4Weight) -> CpuW4Weight:
    """Return a weight on the CPU with bfloat16 scales in the layout of the kernel.

    ValueError: another dtype or device, or a shape that does not fit.
    """
    check("scales", weight.scales, (None, None), (SCALES,))
    if not fits(weight.rows, weight.columns, weight.group) or weight.packed.device.type != "cpu":
        shape = f"[{weight.rows}, {weight.columns}] with groups of {weight.group}"
        raise ValueError(f"{shape} on {weight.packed.device} does not fit")
    zeros = torch.full_like(weight.scales, MIDDLE) if weight.zeros is None else weight.zeros.float()
    # The kernel has (q - 8) * scale + offset.
    offsets = (MIDDLE - zeros) * weight.scales.float()
    pairs = torch.stack((weight.scales, offsets.to(SCALES)), dim=-1).transpose(0, 1).contiguous()
    integers = unpack(weight.packed, weight.columns)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(integers, 1)
    return CpuW4Weight(packed, pairs, weight.group)


def matmul_cpu(x: torch.Tensor, weight: CpuW4Weight) -> torch.Tensor:
    """x [M, K] times the transposed weight [N, K]: [M, N], in x's dtype, with x rounded to bfloat16.

    ValueError for a shape or dtype that does not fit.
    """
    check("x", x, (None, 2 * weight.packed.shape[1]), FLOATS)
    check_contiguous(x=x)
    found: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
        x.to(SCALES), weight.packed, weight.group, weight.scales
    )
    return found.to(x.dtype)
