"""Activations times a 4-bit weight on a CPU, by torch's kernel, which unpacks in registers.

The activations are rounded to bfloat16: its float32 form is plain code, a hundred times as slow. The weight is
laid out for it once, after each quantising.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.checks import FLOATS, check, check_contiguous
from kernels.w4a16.reference import unpack
from kernels.w4a16.weight import MIDDLE, W4Weight

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
