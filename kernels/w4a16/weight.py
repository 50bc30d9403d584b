"""A weight matrix in 4 bits, and W4A16 in plain PyTorch: quantise, dequantise and multiply."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.backend import FLOATS, check, check_device

GROUPS = (32, 64, 128, 256)
PER_WORD = 8
LEVELS = 15
MIDDLE = 8
"""The integer that stands for 0 in a symmetric weight."""


@dataclass(frozen=True, slots=True)
class W4Weight:
    """[N, K], a row per output: weight[n, k] = (q[n, k] - zero[n, k // group]) * scale[n, k // group].

    packed  [N, ceil(K / 8)] int32: q of columns 8 w + i in bits 4 i .. 4 i + 3 of word w, as in the
            pack-quantized format of compressed-tensors
    scales  [N, ceil(K / group)] float32, bfloat16 or float16, not negative
    zeros   [N, ceil(K / group)] uint8 in 0..15, or None: symmetric, 8 everywhere
    columns K
    group   32, 64, 128 or 256 columns; the last group of a row may be shorter
    """

    packed: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    columns: int
    group: int

    def __post_init__(self) -> None:
        check_group(self.group)
        if self.columns < 1:
            raise ValueError(f"columns must be at least 1, got {self.columns}")
        rows, groups = self.packed.shape[0], -(-self.columns // self.group)
        check("packed", self.packed, (None, -(-self.columns // PER_WORD)), (torch.int32,))
        check("scales", self.scales, (rows, groups), FLOATS)
        check_device(self.packed.device, scales=self.scales, zeros=self.zeros)
        if self.zeros is not None:
            check("zeros", self.zeros, (rows, groups), (torch.uint8,))

    @property
    def rows(self) -> int:
        """N."""
        return self.packed.shape[0]

    @property
    def nbytes(self) -> int:
        """Memory of the weight in bytes."""
        parts = (self.packed, self.scales, self.zeros)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)


def check_group(group: int) -> None:
    """Raise ValueError unless `group` is a group size of the kernels."""
    if group not in GROUPS:
        raise ValueError(f"group must be one of {GROUPS}, got {group}")


def quantise_reference(
    weight: torch.Tensor, group: int, symmetric: bool, scale_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Round a [N, K] matrix to nearest (ties to even); return packed, scales and zeros, as W4Weight has them.

    Symmetric: scale = max|w| / 7.5, q = clamp(round(w / scale) + 8, 0, 15). Asymmetric, with the range widened to
    hold 0: scale = (max - min) / 15, zero = clamp(round(-min / scale), 0, 15), q = clamp(round(w / scale) + zero,
    0, 15). The scale is rounded to `scale_dtype` before it divides, so a weight is off by at most half a step
    and, at the ends of the range, by what that rounding clips. A group whose scale rounds to 0 becomes 0.
    """
    rows, columns = weight.shape
    width = -(-columns // group) * group
    grouped = torch.nn.functional.pad(weight.float(), (0, width - columns)).view(rows, -1, group)
    if symmetric:
        scales = (grouped.abs().amax(dim=-1) / 7.5).to(scale_dtype)
        zeros = torch.full_like(scales, MIDDLE, dtype=torch.float32)
    else:
        low, high = grouped.amin(dim=-1).clamp(max=0), grouped.amax(dim=-1).clamp(min=0)
        # Halves are taken first: the range of a group may be beyond float32.
        scales = ((high / 15) - (low / 15)).to(scale_dtype)
        zeros = (-low / _divisor(scales)).round().clamp(0, LEVELS)
    q = (grouped / _divisor(scales).unsqueeze(-1)).round() + zeros.unsqueeze(-1)
    q = torch.where((scales == 0).unsqueeze(-1), zeros.unsqueeze(-1), q.clamp(0, LEVELS))
    packed = pack(q.view(rows, width)[:, :columns].to(torch.int32))
    return packed, scales, None if symmetric else zeros.to(torch.uint8)


def pack(q: torch.Tensor) -> torch.Tensor:
    """Pack [N, K] integers in 0..15 into [N, ceil(K / 8)] int32."""
    rows, columns = q.shape
    words = -(-columns // PER_WORD)
    q = torch.nn.functional.pad(q.to(torch.int32), (0, words * PER_WORD - columns)).view(
        rows, words, PER_WORD
    )
    packed = torch.zeros(rows, words, dtype=torch.int32, device=q.device)
    for i in range(PER_WORD):
        packed |= q[:, :, i] << (4 * i)
    return packed


def unpack(packed: torch.Tensor, columns: int) -> torch.Tensor:
    """Unpack [N, ceil(K / 8)] int32 into [N, K] int32 in 0..15."""
    shifts = torch.arange(0, 4 * PER_WORD, 4, dtype=torch.int32, device=packed.device)
    return ((packed.unsqueeze(-1) >> shifts) & 15).flatten(1)[:, :columns]


def dequantise(weight: W4Weight, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return the [N, K] matrix of a 4-bit weight, computed in float32; `dtype` defaults to the scales' dtype."""
    q = unpack(weight.packed, weight.columns)
    width = weight.scales.shape[1] * weight.group
    q = torch.nn.functional.pad(q, (0, width - weight.columns)).view(weight.rows, -1, weight.group).float()
    zeros: torch.Tensor | int = MIDDLE if weight.zeros is None else weight.zeros.unsqueeze(-1).float()
    result = (q - zeros) * weight.scales.float().unsqueeze(-1)
    return result.view(weight.rows, width)[:, : weight.columns].to(dtype or weight.scales.dtype)


def matmul_reference(x: torch.Tensor, weight: W4Weight) -> torch.Tensor:
    """Return x [M, K] times the transposed weight: [M, N], computed in float32, in x's dtype."""
    return (x.float() @ dequantise(weight, torch.float32).T).to(x.dtype)


def _divisor(scales: torch.Tensor) -> torch.Tensor:
    scales = scales.float()
    return torch.where(scales == 0, torch.ones_like(scales), scales)
