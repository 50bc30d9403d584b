"""Restrict the number of verified tokens of a step to sizes that recur. Pure.

Kernels are specialised for the number of rows of a step: CPU matrix products are compiled for each new size,
which takes as long as some steps of a small model, and only a limited number of them is cached; a GPU computes
whole tiles and replays graphs captured for some sizes. So plans use a grid of sizes: the best size, or a few
less. A coarser grid costs more than it saves, because every size left out is a token not verified. Where an engine
has graphs, their sizes take the place of the grid up to the largest of them: steps of other sizes are padded.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

# The grid has every size up to twice _FINE, and above it _FINE in each octave.
_FINE, _OCTAVES = 16, 16
_GRID = np.concatenate([np.arange(1, _FINE), *[np.arange(_FINE, 2 * _FINE) << k for k in range(_OCTAVES)]])


@lru_cache(maxsize=1024)
def draft_token_counts(num_samples: int, limit: int, graphs: tuple[int, ...] = ()) -> NDArray[np.int64]:
    """Return the numbers of draft tokens that a step may verify, from 0 to at most `limit`, rising.

    With these, `num_samples` plus the draft tokens is the size of a graph, or above the largest a size of the grid.
    If no number above 0 is, or a graph would be left between, `limit` itself is also returned. The array is cached
    and read-only.

    Args:
        num_samples: of the step.
        limit: most draft tokens.
        graphs: numbers of verified tokens for which the engine has graphs, rising.
    """
    largest = max(graphs, default=0)
    sizes = np.concatenate((np.array(graphs, np.int64), _GRID[largest < _GRID]))
    first, last = np.searchsorted(sizes, (num_samples, num_samples + limit), side="right")
    counts = np.concatenate(([0], sizes[first:last] - num_samples))
    if counts[-1] < limit and (len(counts) == 1 or num_samples + limit < largest):
        counts = np.append(counts, limit)
    counts.flags.writeable = False
    return counts
