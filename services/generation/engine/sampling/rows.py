"""Layout of a step's logits: one row is one position of one sample."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kernels.transfer import uploaded

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Rows:
    """`cu[i]:cu[i+1]` are the rows of sample i; n samples, R rows.

    `positions[i]` counts the response tokens that sample i had before the step. `drafts` are the draft tokens
    of all samples, one after another; a sample with k of them has k + 1 rows.
    """

    cu: IntArray
    positions: IntArray
    drafts: IntArray

    @cached_property
    def samples(self) -> IntArray:
        """Sample of each row, [R]."""
        return np.repeat(np.arange(len(self.cu) - 1), np.diff(self.cu))

    @cached_property
    def offsets(self) -> IntArray:
        """Index of each row among the rows of its sample, [R]."""
        offsets: IntArray = np.arange(self.cu[-1]) - self.cu[:-1][self.samples]
        return offsets

    @cached_property
    def row_positions(self) -> IntArray:
        """Response position that each row samples, [R]."""
        positions: IntArray = self.positions[self.samples] + self.offsets
        return positions

    def drafts_of(self, sample: int) -> IntArray:
        """Return the draft tokens of one sample, [k]."""
        return self.drafts[int(self.cu[sample]) - sample : int(self.cu[sample + 1]) - sample - 1]


def put(device: torch.device, **vectors: npt.NDArray[Any]) -> dict[str, torch.Tensor]:
    """Return several vectors on a device, by one copy that is not waited for."""
    return uploaded({name: torch.from_numpy(each) for name, each in vectors.items()}, device)
