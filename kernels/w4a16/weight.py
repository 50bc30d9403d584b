"""A weight matrix in 4 bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.checks import FLOATS, check, check_device

GROUPS = (32, 64, 128, 256)
PER_WORD = 8
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
    """ValueError unless it is a group size that the kernels know."""
    if group not in GROUPS:
        raise ValueError(f"group must be one of {GROUPS}, got {group}")
