"""How many rows a step may have: numbers that come again. Pure.

Kernels are made for a number of rows: a CPU's matrix products are compiled for each that is new, which takes as
long as some steps of a small model, and are kept for a limited number of them; a GPU computes whole tiles of rows,
and replays graphs that were captured for some sizes. So plans keep to a grid: a step has the rows that pay best, or
a few less. One that is too coarse costs more than it saves: of a draft that holds every row left out is a token.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

# Every number up to here is of the grid, and above it so many in each octave.
_FINE = 16
_IN_OCTAVE = 16
_OCTAVES = 16

_GRID = np.concatenate(
    [
        np.arange(1, _FINE),
        *[
            (_FINE << octave) * (_IN_OCTAVE + np.arange(_IN_OCTAVE)) // _IN_OCTAVE
            for octave in range(_OCTAVES)
        ],
    ]
)


def rows_up_to(most: int) -> list[int]:
    """The numbers of the grid, rising."""
    return _GRID[: np.searchsorted(_GRID, most, side="right")].tolist()


@lru_cache(maxsize=1024)
def row_counts(requests: int, most: int) -> NDArray[np.int64]:
    """Numbers of draft tokens that a step of so many samples may have, from 0 to at most `most`, rising.

    Those with which its rows, the samples and their draft tokens, are of the grid; `most` itself where there is
    none above 0. The array is shared, and cannot be written to.
    """
    first, last = np.searchsorted(_GRID, (requests, requests + most), side="right")
    counts = _GRID[first:last] - requests
    if not len(counts) and most > 0:
        counts = np.array([most])
    counts = np.concatenate(([0], counts))
    counts.flags.writeable = False
    return counts
