"""The exact bound that spares noise: which integers could still beat the best score.

g rises with its word, so an entry of scaled logit s beats a score only if its word reaches the first word
with g >= score - s. A table of those words over a grid of gaps answers that without a logarithm, rounded
down to the grid and by a slack that covers every float32 rounding, so no possible winner is ever left out.
"""

import numpy as np
from numpy.typing import NDArray

from kernels.coupled_sampler.noise import G_MAX, G_MIN, gumbel_of_words

CELLS_PER_UNIT = 16
LOWEST_GAP = float(np.floor(G_MIN))
UNREACHABLE = 1 << 32
"""One above every word: no noise bridges the gap."""

ABSOLUTE_SLACK = 1e-3
RELATIVE_SLACK = 2.0**-21
"""Above eight roundings of a score, each at most 2**-24 of its size."""


def word_thresholds() -> NDArray[np.uint64]:
    """Entry i: the first word with g(word) >= LOWEST_GAP + i / CELLS_PER_UNIT; UNREACHABLE from G_MAX on."""
    cells = int(np.ceil((G_MAX - LOWEST_GAP) * CELLS_PER_UNIT)) + 1
    gaps = LOWEST_GAP + np.arange(cells) / CELLS_PER_UNIT
    low = np.zeros(cells, dtype=np.uint64)
    high = np.full(cells, UNREACHABLE, dtype=np.uint64)
    for _ in range(33):
        middle = (low + high) // np.uint64(2)
        reaches = gumbel_of_words(np.minimum(middle, 0xFFFFFFFF).astype(np.uint32)) >= gaps
        reaches |= middle >= UNREACHABLE
        high = np.where(reaches, middle, high)
        low = np.where(reaches | (low == high), low, np.minimum(middle + np.uint64(1), high))
    return high


WORD_THRESHOLDS = word_thresholds()
