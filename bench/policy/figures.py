"""Compute the figures of paired rounds, in which every mode decoded the same tokens. Pure.

Rounds are short and a machine's speed changes. Two modes are therefore compared within each round, and the figure
is the median of these ratios. A goal is missed only if the whole 95 % interval of that median lies below it. The
best fixed length is picked in other rounds than it is compared in, because the fastest of several modes looks
faster than it is in the rounds that it is picked by.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from bench.intervals import MedianInterval, median_interval

PLAIN, ADAPTIVE, SOLVER, PLANNER = "plain", "adaptive", "solver", "planner"
FIXED, TOGGLE = "fixed", "toggle"
"""Prefixes of the names of fixed and of toggled lengths."""


@dataclass(frozen=True, slots=True)
class MeasuredCell:
    """Batches of one size with drafts of one quality: seconds of every mode in every round."""

    model: str
    samples: int
    wrong: float
    tokens: int
    """Tokens of a round."""
    seconds: Mapping[str, Sequence[float]]
    """Seconds by mode; equal indices belong to the same round."""
    cold: Mapping[str, float]
    """Seconds of the first round of the modes that learn."""
    errors: Sequence[float]
    """Relative errors of the step times that the planner predicted."""

    def ratio(self, mode: str, other: str) -> MedianInterval:
        """Return how many times as fast as `other` the mode is."""
        pairs = zip(self.seconds[mode], self.seconds[other], strict=True)
        return median_interval([theirs / ours for ours, theirs in pairs])

    def ratio_to_best(self, mode: str) -> MedianInterval:
        """Return how many times as fast a mode is as the best fixed length, or plain decoding where no length pays.

        The best is picked in the odd rounds for the even ones, and in the even rounds for the odd ones.
        """
        bests = [self._least([PLAIN, *self.fixed], slice(1 - half, None, 2)) for half in (0, 1)]
        ours = self.seconds[mode]
        return median_interval([self.seconds[bests[i % 2]][i] / each for i, each in enumerate(ours)])

    @property
    def fixed(self) -> list[str]:
        """The fixed lengths that stayed in the cell."""
        return self._kind(FIXED)

    @property
    def best_fixed(self) -> str:
        """The fixed length with the least time over all rounds."""
        return self._least(self.fixed)

    @property
    def best(self) -> str:
        """The best fixed length over all rounds, or plain decoding where no length pays."""
        return self._least([PLAIN, *self.fixed])

    @property
    def toggles(self) -> dict[str, MedianInterval]:
        """The ratios of the toggled lengths to plain decoding."""
        return {mode: self.ratio(mode, PLAIN) for mode in self._kind(TOGGLE)}

    @property
    def intervals(self) -> dict[str, MedianInterval]:
        """The ratios of the cell; of the toggled lengths only the worst."""
        return {
            "best_fixed_vs_plain": self.ratio(self.best_fixed, PLAIN),
            "planner_vs_plain": self.ratio(PLANNER, PLAIN),
            "planner_vs_best_fixed": self.ratio_to_best(PLANNER),
            "adaptive_vs_plain": self.ratio(ADAPTIVE, PLAIN),
            "solver_vs_plain": self.ratio(SOLVER, PLAIN),
            "toggle_vs_plain": min(self.toggles.values(), key=lambda each: each.median),
        }

    def row(self) -> dict[str, Any]:
        """Return the cell as it is written."""
        intervals, toggles = self.intervals, self.toggles
        plain = median(self.seconds[PLAIN])
        return {
            "model": self.model,
            "samples": self.samples,
            "wrong": self.wrong,
            "plain_rate": self.tokens / plain,
            "best_fixed": self.best_fixed,
            "toggle_worst": min(toggles, key=lambda mode: toggles[mode].median),
            **{name: each.median for name, each in intervals.items()},
            "planner_cold": median(self.seconds[self.best]) / self.cold[PLANNER],
            "toggle_cold": min(plain / self.cold[mode] for mode in toggles),
            "intervals": {name: [each.low, each.high] for name, each in intervals.items()},
            "rates": {mode: self.tokens / median(each) for mode, each in self.seconds.items()},
            "seconds": {mode: list(each) for mode, each in self.seconds.items()},
        }

    def _kind(self, kind: str) -> list[str]:
        return [mode for mode in self.seconds if mode.startswith(kind)]

    def _least(self, modes: Iterable[str], rounds: slice = slice(None)) -> str:
        """Return the mode with the least median time in these rounds."""
        return min(modes, key=lambda mode: median(self.seconds[mode][rounds]))


def figures_of(cells: Sequence[MeasuredCell]) -> dict[str, float]:
    """Return the worst value of all cells, and as `_upper` the least upper interval bound of all cells."""
    planned = [cell.intervals["planner_vs_best_fixed"] for cell in cells]
    planner = [cell.intervals["planner_vs_plain"] for cell in cells]
    toggled = [each for cell in cells for each in cell.toggles.values()]
    errors = [each for cell in cells for each in cell.errors]
    rows = [cell.row() for cell in cells]
    return {
        "step_time_error_median": median(errors),
        "step_time_error_p90": float(np.quantile(errors, 0.9)),
        **_worst("planner_vs_best_fixed_min", planned),
        **_worst("worst_ratio_vs_plain", toggled),
        **_worst("planner_worst_vs_plain", planner),
        "planner_vs_best_fixed_cold": min(row["planner_cold"] for row in rows),
        "worst_ratio_vs_plain_cold": min(row["toggle_cold"] for row in rows),
    }


def _worst(name: str, ratios: Sequence[MedianInterval]) -> dict[str, float]:
    return {name: min(each.median for each in ratios), f"{name}_upper": min(each.high for each in ratios)}


def verdict(value: float, upper: float, goal: float) -> str:
    """Return whether a figure reaches `goal`; below the goal but within its error it is not missed."""
    if value >= goal:
        return "met"
    return "missed" if upper < goal else "within error"


def promising(seconds: Mapping[int, Sequence[float]], most: int, within: float) -> list[int]:
    """Return at most `most` draft lengths worth more rounds, in ascending order, none far slower than the best.

    Args:
        seconds: seconds of the rounds so far, by length.
        most: maximum number of lengths.
        within: maximum time as a multiple of the best one.
    """
    typical = {length: median(each) for length, each in seconds.items()}
    ranked = sorted(typical, key=lambda length: (typical[length], length))
    return sorted(each for each in ranked[:most] if typical[each] <= within * typical[ranked[0]])


def rotated(modes: Sequence[str], turn: int) -> list[str]:
    """Return the order of a round: every mode has every place in turn, and follows each neighbour equally often."""
    start = turn // 2 % len(modes)
    order = [*modes[start:], *modes[:start]]
    return order[::-1] if turn % 2 else order
