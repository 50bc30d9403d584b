"""Cells of a published table beside the simulated ones, and what fits a workload to published figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import exp
from statistics import fmean, median

import numpy as np

from services.simulator.simulation_setup import LogNormalLengths


@dataclass(frozen=True, slots=True)
class ReplayedCell:
    """A published figure and the simulated one. A free number of the simulation was set by a `fitted` one."""

    table: str
    row: str
    figure: str
    published: float
    simulated: float
    fitted: bool = False

    @property
    def error(self) -> float:
        """Deviation of the simulated figure, as a share of the published one."""
        return self.simulated / self.published - 1


def errors(cells: Sequence[ReplayedCell]) -> dict[str, float]:
    """Return the middle and the largest error of the cells that are predicted, without sign."""
    found = [abs(each.error) for each in cells if not each.fitted]
    return {"median": median(found), "largest": max(found), "cells": float(len(found))}


def solved(wanted: float, of: Callable[[float], float], low: float, high: float, rounds: int = 16) -> float:
    """Return where a rising function has the wanted value, by bisection; the nearer end where it is outside."""
    for _ in range(rounds):
        middle = (low + high) / 2
        if of(middle) < wanted:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def lengths_with(
    mean: float, longest: float, limit: int, samples: int, alike: float = 0.5, steps: int = 24
) -> LogNormalLengths:
    """Return log-normal lengths whose mean, and whose longest of so many samples on average, are as given."""

    def drawn(spread: float) -> tuple[LogNormalLengths, float]:
        found = LogNormalLengths(mean / exp(spread**2 / 2), spread, limit, alike)
        # Twice, because the limit takes from the mean.
        for _ in range(2):
            random = np.random.default_rng(1)
            actual = fmean(float(found.draw(samples // 16, 16, random).mean()) for _ in range(steps))
            found = replace(found, median=found.median * mean / actual)
        random = np.random.default_rng(1)
        return found, fmean(float(found.draw(samples // 16, 16, random).max()) for _ in range(steps))

    return drawn(solved(longest, lambda spread: drawn(spread)[1], 0.05, 1.5, 8))[0]


def acceptance_for(rate: float, length: int) -> float:
    """Return the acceptance of each token for which so large a share of the tokens of such drafts is accepted."""
    return solved(rate, lambda p: sum(p**k for k in range(1, length + 1)) / length, 0.0, 1.0, 40)
