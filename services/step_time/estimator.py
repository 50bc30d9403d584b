"""Estimate how long an engine step takes, from a sweep at the start and from every measured step. Pure.

The estimator works for any model and device, because it assumes nothing about them. It keeps a table of measured
steps, one for each cell of similar shapes (samples, verified tokens, context), and predicts by Gaussian-process
regression from the prior of the sweep (see `StepTimePrior`). The deviation of a step from its prior is taken as the
sum of

- a share of the whole, because clocks change;
- a time for each token of context, and for each that draft tokens attend to, because the sweep has short contexts;
- a separate share for each shape, common to similar shapes.

Each has a variance. So a cell that is measured often is predicted as measured, its neighbours follow, and without
measurements the prior remains. Predictions never fall with the verified tokens. Measurements lose weight with age;
three outliers in a row, or a dozen smaller surprises, on the same side are a change of the machine, and earlier
measurements are almost forgotten. Measurements may arrive late and in any order.

The engine waits for predictions, so they are compiled. numba is imported at first use, which must be after vLLM was
imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, log2
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from kernels.late_module import LateModule
from services.step_time.sweep import SHORT_CONTEXT, Floats, MeasuredStep, StepTimePrior

_compiled: Any = LateModule("services.step_time.compiled")

# Cells per octave: rows, samples, context of a sample. Most cells; the least recently measured one is dropped
# first.
_CELLS, _MAX_CELLS = (4, 2, 1), 32
# Most measurements that a cell averages over.
_AVERAGED = 8
# Ratio to the prediction at which a measurement is clipped, and ratio beyond which it is a surprise.
_OUTLIER_RATIO, _SURPRISE_RATIO = 1.5, 1.02
# Number of surprises in a row on one side that mean a changed machine, and the number that an outlier counts for.
_CHANGED, _OUTLIER_DOUBT = 12, 4
# Age, in measurements, that a change of the machine adds to earlier measurements.
_OUTDATED = 512


class StepTimeEstimator:
    """Step times of one engine: `observe` measured ones, `predict` others."""

    def __init__(self, sweep: Sequence[MeasuredStep] = ()) -> None:
        """Begin with the steps of a sweep; without one the first measurement sets the scale."""
        short = [each for each in sweep if each.context <= SHORT_CONTEXT * each.samples]
        self._prior = StepTimePrior.of(short)
        self._known = bool(short)
        self._observed = 0
        # Surprises in a row: positive if steps took longer than predicted, negative if shorter.
        self._doubt = 0
        # Row of each cell in the table, the least recently measured first.
        self._places: dict[tuple[int, int, int], int] = {}
        self._table = np.zeros((_MAX_CELLS, 6))
        # Derived values of the cells, and the solution of the regression.
        self._derived = np.zeros((_MAX_CELLS, 8))
        self._shares, self._weights = np.zeros(4), np.zeros(_MAX_CELLS)
        self._solved = True
        for each in sweep:
            if each.context > SHORT_CONTEXT * each.samples:
                self.observe(each.samples, each.rows, each.context, each.seconds)

    @property
    def known(self) -> bool:
        """True once anything was measured."""
        return self._known

    def predict(self, samples: int, rows: ArrayLike, context: float) -> Floats:
        """Return the seconds of steps of `samples` samples with `context` tokens in all, for `rows` [k], rising.

        Args:
            samples: at least 1.
            rows: verified tokens, one for each sample included.
            context: tokens of all samples together.
        """
        tokens = np.ascontiguousarray(rows, np.float64).ravel()
        found, used = np.empty(len(tokens)), len(self._places)
        # Solved once after each measurement.
        now, self._solved = 0.0 if self._solved else float(self._observed), True
        fitted = (self._table[:used], now, self._derived[:used], self._shares, self._weights[:used])
        _compiled.predict(self._prior, *fitted, float(samples), tokens, float(context), found)
        return found

    def seconds(self, samples: int, rows: int, context: float) -> float:
        """Return the seconds of one step."""
        return float(self.predict(samples, (rows,), context)[0])

    def observe(self, samples: int, rows: int, context: float, seconds: float) -> float:
        """Learn the time of a step; return what was predicted for it. Impossible values are ignored."""
        if samples < 1 or rows < samples or context < 0 or not (isfinite(seconds) and seconds > 0.0):
            return 0.0
        if not self._known:
            self._prior, self._known = StepTimePrior.unknown(seconds), True
        predicted = self.seconds(samples, rows, context)
        self._observed += 1
        key = (
            round(_CELLS[0] * log2(rows)) if rows > samples else -1,
            round(_CELLS[1] * log2(samples)),
            round(_CELLS[2] * log2(1 + context / samples)),
        )
        place, count = self._places.get(key), 1.0
        if place is not None:
            seconds = self._clipped(seconds, predicted)
            # The mean is scaled to the new shape, because times differ within a cell.
            cell = self._table[place].tolist()
            before = self.seconds(int(cell[0]), int(cell[1]), cell[2])
            count = min(cell[4] + 1, _AVERAGED)
            seconds += (cell[3] * predicted / before - seconds) * (1 - 1 / count)
        elif len(self._places) < _MAX_CELLS:
            place = len(self._places)
        else:
            place = self._places.pop(next(iter(self._places)))
        self._places.pop(key, None)
        self._places[key] = place
        self._table[place, :6] = samples, rows, context, seconds, count, self._observed
        self._solved = False
        return predicted

    def _clipped(self, seconds: float, predicted: float) -> float:
        """Return measured seconds of a shape that was measured before, clipped if they are an outlier."""
        ratio = seconds / predicted
        side, far = (1, ratio) if ratio > 1 else (-1, 1 / ratio)
        doubt = _OUTLIER_DOUBT if far > _OUTLIER_RATIO else int(far > _SURPRISE_RATIO)
        self._doubt = (self._doubt if self._doubt * side > 0 and doubt else 0) + side * doubt
        if abs(self._doubt) < _CHANGED:
            return predicted * min(far, _OUTLIER_RATIO) ** side
        # Cells start to count again, with the greater age.
        self._table[:, 4] = 0
        self._table[:, 5] -= _OUTDATED
        self._doubt = 0
        return seconds


def warm_up() -> None:
    """Compile or load the compiled functions, so that the first step does not wait for them."""
    estimator = StepTimeEstimator()
    estimator.observe(1, 1, 1, 1.0)
    estimator.seconds(1, 2, 1)
