"""The definition of a coupled sample, row by row, in plain numpy."""

import math

import numpy as np
from numpy.typing import NDArray

from kernels.coupled_sampler.noise import MAX_POSITION, Domain, gumbel

INVALID = -1
"""Token of a row that cannot be sampled, so that the engine can fail that sample alone."""


def coupled_argmax_reference(
    logits: NDArray[np.float32],
    seeds: NDArray[np.uint64],
    positions: NDArray[np.int64],
    temperature: NDArray[np.float32],
    domain: Domain = Domain.TOKEN,
) -> NDArray[np.int64]:
    """argmax_v(logit_v / T + g(seed, position, v)) for each row; ties go to the lowest token id.

    logits [N, V], the rest [N]; returns [N] token ids. Temperature 0 is greedy (no noise). An entry of -inf
    never wins. INVALID for a row with a NaN or +inf logit, without any finite scaled logit, with a
    temperature that is negative or not finite, or with a position outside [0, 2**32).
    """
    return np.array(
        [
            _sample_row(row, int(seed), int(position), np.float32(t), domain)
            for row, seed, position, t in zip(logits, seeds, positions, temperature, strict=True)
        ],
        dtype=np.int64,
    )


def _sample_row(
    row: NDArray[np.float32], seed: int, position: int, temperature: np.float32, domain: Domain
) -> int:
    if not _is_valid(row, position, temperature):
        return INVALID
    if temperature == 0:
        return int(np.argmax(row))
    with np.errstate(over="ignore", under="ignore"):
        scores = row / temperature + gumbel(seed, position, len(row), domain)
    best = int(np.argmax(scores))
    return INVALID if scores[best] == -np.inf else best


def _is_valid(row: NDArray[np.float32], position: int, temperature: np.float32) -> bool:
    """Return whether the row defines a distribution: max is NaN if any entry is."""
    return (
        math.isfinite(row.max())
        and math.isfinite(temperature)
        and bool(temperature >= 0)
        and 0 <= position <= MAX_POSITION
    )
