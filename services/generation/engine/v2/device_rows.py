"""Layout of a step's logits where only the device knows the tokens: as `sampling.rows`, for V2."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kernels.transfer import uploaded
from services.generation.engine.sampling.rows import IntArray


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

    def drafts(self) -> torch.Tensor:
        """Return the draft tokens, one sample after the other, [R - n] int64."""
        if len(self.offsets) == len(self.cu) - 1:
            return self.inputs.new_empty(0, dtype=torch.int64)
        return self.inputs[self.put(np.flatnonzero(self.offsets))].long()

    def row_positions(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the response positions that some rows sample, by their indices on the device, [m]."""
        there = self.put_all(samples=self.samples, offsets=self.offsets)
        positions: torch.Tensor = (self.positions[there["samples"]] + there["offsets"])[rows]
        return positions

    def put(self, vector: npt.NDArray[Any]) -> torch.Tensor:
        """Return a vector on the device; nobody waits for it."""
        return self.put_all(vector=vector)["vector"]

    def put_all(self, **vectors: npt.NDArray[Any]) -> dict[str, torch.Tensor]:
        """Return several vectors on the device, by one copy."""
        return uploaded({name: torch.from_numpy(each) for name, each in vectors.items()}, self.device)
