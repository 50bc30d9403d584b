"""Keeps a step-time model true to the steps that are measured: a small affine correction, learned online. Pure.

Recursive least squares with forgetting on measured = gain * predicted + offset, in relative terms: every step
counts the same, long or short. A step that took much longer because of something else is cut down to a bounded
surprise; several such in a row are no accident, and are believed.
"""

from __future__ import annotations

from math import isfinite

import numpy as np
from numpy.typing import ArrayLike, NDArray

from services.policy.step_time import StepTime

# A step's weight after n more steps is FORGETTING ** n: a memory of about two hundred steps.
_FORGETTING = 0.995
# Uncertainty at the start, and the most there ever is: forgetting without news would let it grow for ever.
_DOUBT_GAIN, _DOUBT_OFFSET = 1.0, 0.25
_MOST_DOUBT = 2.0
# A measured step counts as at most this many times longer or shorter than was expected.
_SURPRISE = 1.5
# With so many in a row on the same side, it is the model that is wrong.
_BELIEVED = 3


class Correction:
    """An affine correction of predicted step times.

    A corrected time is within 1/limit and limit times the predicted one, and grows with it.
    """

    def __init__(self, limit: float = 4.0) -> None:
        """`limit` > 1: how far the correction may go, as a factor."""
        if not (isfinite(limit) and limit > 1):
            raise ValueError(f"the limit of a correction is a factor above 1, not {limit}")
        self._limit = limit
        self._gain, self._offset = 1.0, 0.0
        self._scale: float | None = None
        # Covariance of the two: variances, and what they share. Plain numbers: a step has no time for small arrays.
        self._doubt = (_DOUBT_GAIN, 0.0, _DOUBT_OFFSET)
        # Surprises in a row: positive when steps took longer, negative when shorter.
        self._surprises = 0

    @property
    def gain(self) -> float:
        """The factor."""
        return self._gain

    @property
    def offset(self) -> float:
        """Seconds added."""
        return self._offset * (self._scale or 0.0)

    def apply(self, predicted: ArrayLike) -> NDArray[np.float64]:
        """Corrected seconds, of any shape."""
        predicted = np.asarray(predicted, np.float64)
        corrected = self._gain * predicted
        # No step, no time: the offset belongs to steps.
        corrected += self.offset * (predicted > 0)
        # As np.clip, which takes several times as long for the few numbers of a plan.
        return np.minimum(np.maximum(corrected, predicted / self._limit), predicted * self._limit)

    def observe(self, predicted: float, measured: float) -> None:
        """A step was predicted (uncorrected) and measured, both in seconds; senseless times are passed over."""
        if not (isfinite(predicted) and isfinite(measured) and predicted > 0 and measured > 0):
            return
        if self._scale is None:
            self._scale = predicted
        relative = self._scale / predicted
        expected = self.applied(predicted) / predicted
        ratio = self._believed(measured / predicted, expected)
        gains, shared, offsets = self._doubt
        spread = (gains + shared * relative, shared + offsets * relative)
        scale = _FORGETTING + spread[0] + spread[1] * relative
        error = ratio - (self._gain + self._offset * relative)
        self._gain = min(max(self._gain + spread[0] / scale * error, 1 / self._limit), self._limit)
        self._offset = min(max(self._offset + spread[1] / scale * error, -self._limit), self._limit)
        self._doubt = _less_doubt(self._doubt, spread, scale)

    def applied(self, predicted: float) -> float:
        """As `apply`, of one time, in a fraction of the time."""
        corrected = self._gain * predicted + self.offset
        return min(max(corrected, predicted / self._limit), predicted * self._limit)

    def _believed(self, ratio: float, expected: float) -> float:
        """What a measured ratio counts as."""
        if expected / _SURPRISE <= ratio <= expected * _SURPRISE:
            self._surprises = 0
            return ratio
        side = 1 if ratio > expected else -1
        self._surprises = self._surprises + side if self._surprises * side > 0 else side
        if abs(self._surprises) < _BELIEVED:
            return expected * _SURPRISE**side
        self._doubt = (_DOUBT_GAIN, 0.0, _DOUBT_OFFSET)
        return ratio


def _less_doubt(
    doubt: tuple[float, float, float], spread: tuple[float, float], scale: float
) -> tuple[float, float, float]:
    """The covariance after a step was seen, and what is older has been forgotten a little."""
    gains = (doubt[0] - spread[0] * spread[0] / scale) / _FORGETTING
    shared = (doubt[1] - spread[0] * spread[1] / scale) / _FORGETTING
    offsets = (doubt[2] - spread[1] * spread[1] / scale) / _FORGETTING
    bound = min(1.0, _MOST_DOUBT / (gains + offsets))
    return gains * bound, shared * bound, offsets * bound


class CorrectedStepTime:
    """A step-time model and its correction by what is measured."""

    def __init__(self, model: StepTime, correction: Correction) -> None:
        self.model = model
        self.correction = correction

    def seconds(self, requests: ArrayLike, rows: ArrayLike, context: ArrayLike) -> NDArray[np.float64]:
        """The predicted time, corrected; the arguments broadcast."""
        return self.correction.apply(self.model.seconds(requests, rows, context))

    def observe(self, requests: int, rows: int, context: int, seconds: float) -> float:
        """A step was measured. What had been predicted for it, in seconds."""
        return self.learn(float(self.model.seconds(requests, rows, context)), seconds)

    def learn(self, raw: float, seconds: float) -> float:
        """As `observe`, of a step for which the model predicts `raw` seconds."""
        predicted = self.correction.applied(raw)
        self.correction.observe(raw, seconds)
        return predicted
