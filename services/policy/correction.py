"""Keeps a step-time model true to the steps that are measured: a small linear correction, learned online. Pure.

Recursive least squares with forgetting on

    measured = gain * predicted + verify * verification + offset,

where `verification` is what the model predicts beyond the same step without drafts: the two are other kernels, and
their predictions are wrong apart from each other. All in relative terms: every step counts the same, long or short.
A step that took much longer because of something else is cut down to a bounded surprise; several such in a row are
no accident, and are believed.
"""

from __future__ import annotations

from math import isfinite
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from services.policy.curve import Curve, Curves
from services.policy.step_time import StepTime

# A step's weight after n more steps is FORGETTING ** n: a memory of about two hundred steps.
_FORGETTING = 0.995
# A measured step counts as at most this many times longer or shorter than was expected.
_SURPRISE = 1.5
# With so many in a row on the same side, it is the model that is wrong.
_BELIEVED = 3


class _Doubt(NamedTuple):
    """Covariance of gain (g), offset (o) and verify (v). Plain numbers: a step has no time for small arrays."""

    gg: float
    oo: float
    vv: float
    go: float = 0.0
    gv: float = 0.0
    ov: float = 0.0

    def spread(self, o: float, v: float) -> tuple[float, float, float]:
        """Its product with (1, o, v)."""
        return (
            self.gg + self.go * o + self.gv * v,
            self.go + self.oo * o + self.ov * v,
            self.gv + self.ov * o + self.vv * v,
        )

    def less(self, spread: tuple[float, float, float], scale: float) -> _Doubt:
        """After a step was seen, and what is older has been forgotten a little."""
        g, o, v = spread
        gg = (self.gg - g * g / scale) / _FORGETTING
        oo = (self.oo - o * o / scale) / _FORGETTING
        vv = (self.vv - v * v / scale) / _FORGETTING
        # Forgetting without news would let it grow for ever.
        bound = min(1.0, _MOST_DOUBT / (gg + oo + vv))
        rest = bound / _FORGETTING
        return _Doubt(
            gg * bound,
            oo * bound,
            vv * bound,
            (self.go - g * o / scale) * rest,
            (self.gv - g * v / scale) * rest,
            (self.ov - o * v / scale) * rest,
        )


# In units of how uncertain a measured step is, some 5 %: a gain is known to a tenth at first, and what
# verification takes to a fifth. With less doubt a plain step after many with drafts says too little of which of the
# two is wrong.
_AT_FIRST = _Doubt(gg=4.0, oo=0.25, vv=16.0)
_MOST_DOUBT = 24.0


class Correction:
    """A linear correction of predicted step times.

    A corrected time is within 1/limit and limit times the predicted one, and grows with it and with what of it is
    verification.
    """

    def __init__(self, limit: float = 4.0) -> None:
        """`limit` > 1: how far the correction may go, as a factor."""
        if not (isfinite(limit) and limit > 1):
            raise ValueError(f"the limit of a correction is a factor above 1, not {limit}")
        self._limit = limit
        self._gain, self._offset, self._verify = 1.0, 0.0, 0.0
        self._scale: float | None = None
        self._doubt = _AT_FIRST
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

    @property
    def verify(self) -> float:
        """Added to the factor where it is of verification."""
        return self._verify

    def doubted(self) -> Correction:
        """One that begins like this one, and is as uncertain as one that begins with nothing."""
        begun = Correction(self._limit)
        begun._gain, begun._offset, begun._verify = self._gain, self._offset, self._verify
        begun._scale = self._scale
        return begun

    def apply(self, predicted: ArrayLike, verification: ArrayLike = 0.0) -> NDArray[np.float64]:
        """Corrected seconds, of any shape; `verification` is what of `predicted` is beyond plain decoding."""
        predicted = np.asarray(predicted, np.float64)
        corrected = self._gain * predicted
        corrected += self._verify * np.asarray(verification)
        # No step, no time: the offset belongs to steps.
        corrected += self.offset * (predicted > 0)
        # As np.clip, which takes several times as long for the few numbers of a plan.
        return np.minimum(np.maximum(corrected, predicted / self._limit), predicted * self._limit)

    def curve(self, raw: Curve) -> Curve:
        """As `apply`, of steps that differ by their draft tokens."""
        return raw.corrected(self._gain + self._verify, self.offset - self._verify * raw.plain, self._limit)

    def applied(self, predicted: float, verification: float = 0.0) -> float:
        """As `apply`, of one step's time, in a fraction of the time."""
        corrected = self._gain * predicted + self._verify * verification + self.offset
        return min(max(corrected, predicted / self._limit), predicted * self._limit)

    def observe(self, predicted: float, measured: float, verification: float = 0.0) -> None:
        """A step was predicted (uncorrected) and measured, in seconds; senseless times are passed over."""
        if not (isfinite(predicted) and isfinite(measured) and predicted > 0 and measured > 0):
            return
        if self._scale is None:
            self._scale = predicted
        o, v = self._scale / predicted, verification / predicted
        ratio = self._believed(measured / predicted, self.applied(predicted, verification) / predicted)
        spread = self._doubt.spread(o, v)
        scale = _FORGETTING + spread[0] + spread[1] * o + spread[2] * v
        step = (ratio - (self._gain + self._offset * o + self._verify * v)) / scale
        least, most = 1 / self._limit, self._limit
        self._gain = min(max(self._gain + spread[0] * step, least), most)
        self._offset = min(max(self._offset + spread[1] * step, -most), most)
        self._verify = min(max(self._verify + spread[2] * step, least - self._gain), most - self._gain)
        self._doubt = self._doubt.less(spread, scale)

    def _believed(self, ratio: float, expected: float) -> float:
        """What a measured ratio counts as."""
        if expected / _SURPRISE <= ratio <= expected * _SURPRISE:
            self._surprises = 0
            return ratio
        side = 1 if ratio > expected else -1
        self._surprises = self._surprises + side if self._surprises * side > 0 else side
        if abs(self._surprises) < _BELIEVED:
            return expected * _SURPRISE**side
        self._doubt = _AT_FIRST
        return ratio


class CorrectedStepTime:
    """A step-time model and its correction by what is measured.

    What a model gets wrong differs with the size of a batch, and batches shrink from hundreds of samples to one and
    begin anew: so each octave of sizes has a correction of its own. It begins as that of the nearest octave.
    """

    def __init__(self, model: StepTime, correction: Correction) -> None:
        """`correction` is the one for all sizes until anything is measured."""
        self.model = model
        self.correction = correction
        """Of the size that was measured last."""
        self._corrections: dict[int, Correction] = {}
        self._curves = Curves(model)
        self._asked = (0, 0)
        self._found: Curve | None = None

    def seconds(self, requests: ArrayLike, rows: ArrayLike, context: ArrayLike) -> NDArray[np.float64]:
        """The predicted time, corrected; the arguments broadcast."""
        raw = self.model.seconds(requests, rows, context)
        plain = self.model.seconds(requests, requests, context)
        verification = (raw - plain) * (raw > 0)
        # As `int.bit_length`.
        octaves = np.broadcast_to(np.frexp(requests)[1], raw.shape)
        found = np.empty_like(raw)
        for octave in np.unique(octaves):
            at = octaves == octave
            found[at] = self._nearest(int(octave)).apply(raw[at], verification[at])
        return found

    def curve(self, requests: int, context: int) -> Curve:
        """Of steps of so many samples, at least one, by their draft tokens."""
        return self._nearest(requests.bit_length()).curve(self._raw(requests, context))

    def observe(self, requests: int, rows: int, context: int, seconds: float) -> float:
        """A step was measured. What had been predicted for it, in seconds."""
        curve, octave = self._raw(requests, context), requests.bit_length()
        raw = curve.raw_seconds(rows - requests)
        verification = raw - curve.plain
        self.correction = self._nearest(octave)
        if octave not in self._corrections:
            self._corrections[octave] = self.correction = self.correction.doubted()
        predicted = self.correction.applied(raw, verification)
        self.correction.observe(raw, seconds, verification)
        return predicted

    def _nearest(self, octave: int) -> Correction:
        """The correction of these sizes, or of the nearest that were measured."""
        found = self._corrections.get(octave)
        if found is not None:
            return found
        if not self._corrections:
            return self.correction
        return self._corrections[min(self._corrections, key=lambda each: abs(each - octave))]

    def _raw(self, requests: int, context: int) -> Curve:
        """A step is decided, and then measured."""
        if self._found is None or self._asked != (requests, context):
            self._asked, self._found = (requests, context), self._curves.of(requests, context)
        return self._found
