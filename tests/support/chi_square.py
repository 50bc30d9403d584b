"""Counts against probabilities."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch


def chi_square(observed: npt.NDArray[np.float64], expected: npt.NDArray[np.float64]) -> float:
    """Return the p-value of Pearson's test; cells of fewer than 5 expected are taken together."""
    observed, expected = observed.ravel(), expected.ravel()
    small = expected < 5
    observed = np.append(observed[~small], observed[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    assert observed[expected == 0].sum() == 0, "something impossible was observed"
    kept = expected > 0
    statistic = ((observed - expected)[kept] ** 2 / expected[kept]).sum()
    halves = torch.tensor([kept.sum() - 1, statistic], dtype=torch.float64) / 2
    return float(torch.special.gammaincc(halves[0], halves[1]))


def histogram(tokens: npt.NDArray[np.integer], vocab_size: int) -> npt.NDArray[np.float64]:
    """Count of every sequence: [n, length] -> [V] * length."""
    found, _ = np.histogramdd(tokens, bins=[np.arange(vocab_size + 1) - 0.5] * tokens.shape[1])
    return found
