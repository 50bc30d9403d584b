"""Layout of a step's logits: one row is one position of one sample."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Rows:
    """`cu[i]:cu[i+1]` are the rows of sample i; n samples, R rows.

    `positions[i]` counts the response tokens that sample i had before the step. `drafts` are the draft tokens
    of all samples, one after another; a sample with k of them has k + 1 rows.
    """

    cu: IntArray
    positions: IntArray
    drafts: IntArray

    @property
    def samples(self) -> IntArray:
        """Sample of each row, [R]."""
        return np.repeat(np.arange(len(self.cu) - 1), np.diff(self.cu))

    @property
    def offsets(self) -> IntArray:
        """Index of each row among the rows of its sample, [R]."""
        offsets: IntArray = np.arange(self.cu[-1]) - self.cu[:-1][self.samples]
        return offsets

    @property
    def row_positions(self) -> IntArray:
        """Response position that each row samples, [R]."""
        positions: IntArray = self.positions[self.samples] + self.offsets
        return positions

    def drafts_of(self, sample: int) -> IntArray:
        """Return the draft tokens of one sample, [k]."""
        return self.drafts[int(self.cu[sample]) - sample : int(self.cu[sample + 1]) - sample - 1]

    def part(self, chosen: npt.NDArray[np.bool_], behind: IntArray) -> tuple[IntArray, Rows]:
        """Return the rows of some samples ([n] bool) behind the first `behind` ([n]) of each, at least one.

        Returns:
            Their indices here, and their layout among themselves.
        """
        index = np.flatnonzero(chosen[self.samples] & (self.offsets >= behind[self.samples]))
        cu = np.concatenate(([0], np.cumsum((np.diff(self.cu) - behind)[chosen])))
        # Row j of a sample has its draft j, but for the last row.
        has_draft = np.ones(self.cu[-1], bool)
        has_draft[self.cu[1:] - 1] = False
        drafts = np.full(self.cu[-1], -1, np.int64)
        drafts[has_draft] = self.drafts
        return index, Rows(cu, (self.positions + behind)[chosen], drafts[index[has_draft[index]]])
