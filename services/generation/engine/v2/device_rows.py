"""Layout of a step's logits where only the device knows the tokens: as `sampling.rows`, for V2."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from services.generation.engine.sampling.rows import IntArray, put


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """`cu[i]:cu[i+1]` are the rows of sample i; n samples, R rows.

    `positions` [n] int64 counts the response tokens that a sample had before the step, and `inputs` [R] are the
    tokens that rows were computed from, of which all but the first of a sample are its drafts: both on the device.
    """

    cu: IntArray
    positions: torch.Tensor
    inputs: torch.Tensor
    samples: IntArray = field(init=False)
    """Sample of each row, [R]."""
    offsets: IntArray = field(init=False)
    """Index of each row among the rows of its sample, [R]."""

    def __post_init__(self) -> None:
        samples = np.repeat(np.arange(len(self.cu) - 1), np.diff(self.cu))
        object.__setattr__(self, "samples", samples)
        object.__setattr__(self, "offsets", np.arange(self.cu[-1]) - self.cu[:-1][samples])

    @property
    def device(self) -> torch.device:
        """Device of the logits."""
        return self.positions.device

    @property
    def drafted(self) -> IntArray:
        """Number of drafts of each sample, [n]."""
        drafted: IntArray = np.diff(self.cu) - 1
        return drafted

    def row_positions(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the response positions that some rows sample, by their indices on the device, [m]."""
        there = self.put_all(samples=self.samples, offsets=self.offsets)
        positions: torch.Tensor = (self.positions[there["samples"]] + there["offsets"])[rows]
        return positions

    def put_all(self, **vectors: npt.NDArray[Any]) -> dict[str, torch.Tensor]:
        """Return several vectors on the device, by one copy."""
        return put(self.device, **vectors)
