"""Find the saturation point of an instance's throughput, after RLHFSpec (section 6.1). Pure.

Throughput over the number of samples is a roofline: it grows in proportion while one more sample does not prolong a
step, and stays constant once steps grow in proportion. The curve comes from the step-time model and is corrected by
measured steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite, log
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

# Throughput is compared with that of this many times the samples, because measured curves are locally uneven.
_WINDOW = 1.5
# Measured times are kept for counts of samples that differ by this factor.
_GRID = 1.25
# Weight of the newest measurement in the running mean, and the ratio to the mean at which it is clipped.
_SMOOTHING, _OUTLIER_RATIO = 0.2, 2.0
# A threshold stays until the saturation point differs from it by more than this share.
_SLACK = 0.15
# Tokens. A shorter prefill is hidden in the time that a step takes anyway.
_SHORTEST_PREFILL = 64.0


class StepTimeModel(Protocol):
    """Part of services.reallocator.planning.step_time_model.StepTime that is used here."""

    def seconds(self, requests: ArrayLike, rows: ArrayLike, context: ArrayLike) -> NDArray[np.float64]:
        """Return the predicted time of steps, in seconds."""


@dataclass(frozen=True, slots=True)
class ThroughputCurve:
    """Step time over the number of samples, and the throughput that follows from it.

    `seconds` are those of a step with 1, 2, ... samples; `tokens` is the number that a step brings each sample
    (acceptance length); `prefill` is the time by which each prefilled token prolongs a step, infinite if unknown.
    """

    seconds: tuple[float, ...]
    tokens: float = 1.0
    prefill: float = inf

    def prefill_seconds(self, tokens: int) -> float:
        """Return the time by which prefilling so many tokens prolongs a step."""
        return self.prefill * max(0, tokens)

    def step_seconds(self, samples: int) -> float:
        """Return the time of a step: 0 for no samples; beyond the curve as if they took turns."""
        most = len(self.seconds)
        if samples <= 0:
            return 0.0
        if samples > most:
            return self.seconds[-1] * samples / most
        return self.seconds[samples - 1]

    def throughput(self, samples: int) -> float:
        """Return the tokens per second with so many samples (equation 4)."""
        return samples * self.tokens / self.step_seconds(samples) if samples > 0 else 0.0

    def finish_seconds(self, remaining: Sequence[float]) -> float:
        """Return the seconds until samples with these remaining tokens have all ended."""
        total = before = 0.0
        for place, tokens in enumerate(sorted(remaining)):
            total += (tokens - before) / self.tokens * self.step_seconds(len(remaining) - place)
            before = tokens
        return total

    def saturation_point(self, flatness: float) -> int | None:
        """Return the fewest samples from which 1 % more of them bring less than `flatness` % more throughput.

        None when that is beyond the curve: every sample still pays.
        """
        counts = np.arange(1, len(self.seconds) + 1)
        throughput = counts / np.asarray(self.seconds)
        here = counts[:-1]
        there = np.minimum(np.maximum(here + 1, np.ceil(here * _WINDOW).astype(int)), len(self.seconds))
        gains = np.log(throughput[there - 1] / throughput[here - 1]) / np.log(there / here)
        flat = np.flatnonzero(gains < flatness)
        return int(flat[0]) + 1 if len(flat) else None


class Roofline:
    """Throughput of one or several equal instances: a model's, corrected by measured steps."""

    def __init__(self, model: StepTimeModel, most: int, flatness: float = 0.25) -> None:
        """Start from a model, for instances that run at most `most` samples at once."""
        self._model = model
        self._most = max(1, most)
        self._flatness = flatness
        self._tokens = 1.0
        self._context = 1.0
        self._threshold: int | None = None
        # Until the next measurement: many instances share it.
        self._curve: ThroughputCurve | None = None
        # Place on the grid -> (samples, ratio of measured to predicted time).
        self._measured: dict[int, tuple[float, float]] = {}

    def observe(self, samples: int, seconds: float, tokens: float, context: float) -> None:
        """Learn from a step that brought each of `samples` samples `tokens` tokens in `seconds`.

        `context` is their mean length in tokens. Impossible values are ignored.
        """
        usable = all(isfinite(each) for each in (seconds, tokens, context))
        if not usable or samples < 1 or seconds <= 0:
            return
        self._curve = None
        self._context += (max(context, 1.0) - self._context) * (_SMOOTHING if self._measured else 1.0)
        if tokens > 0:
            self._tokens += (max(tokens, 1.0) - self._tokens) * _SMOOTHING
        predicted = float(self._model.seconds(samples, samples, samples * self._context))
        place = round(log(samples) / log(_GRID))
        known = self._measured.get(place)
        ratio = seconds / predicted
        if known is None:
            self._measured[place] = float(samples), ratio
            return
        ratio = min(max(ratio, known[1] / _OUTLIER_RATIO), known[1] * _OUTLIER_RATIO)
        count, mean = known
        self._measured[place] = (count + (samples - count) * _SMOOTHING, mean + (ratio - mean) * _SMOOTHING)

    def curve(self) -> ThroughputCurve:
        """Return the current curve.

        The model's error is interpolated between measured counts, and constant beyond. The curve is made monotone
        and convex, as a roofline is: fewer samples take no longer, and each further sample adds no less than the
        one before. Measurements above it were disturbed, because disturbances only prolong steps.
        """
        if self._curve is None:
            self._curve = self._fitted()
        return self._curve

    def _fitted(self) -> ThroughputCurve:
        counts = np.arange(1, self._most + 1)
        seconds = self._model.seconds(counts, counts, counts * self._context)
        if self._measured:
            points = sorted(self._measured.values())
            measured, ratios = zip(*points, strict=True)
            seconds = seconds * np.interp(np.log(counts), np.log(measured), ratios)
            seconds = _convex(np.minimum.accumulate(seconds[::-1])[::-1])
        return ThroughputCurve(tuple(float(each) for each in seconds), self._tokens, self._prefill())

    def _prefill(self) -> float:
        """Return the prefill time per token at the mean length, with the error of the largest batches."""
        tokens = max(_SHORTEST_PREFILL, self._context)
        with_prefill, without = (float(self._model.seconds(1, rows, tokens)) for rows in (tokens, 1))
        ratio = max(self._measured.items())[1][1] if self._measured else 1.0
        return (with_prefill - without) / tokens * ratio if with_prefill > without else inf

    def threshold(self, curve: ThroughputCurve) -> int:
        """Return the saturation point of the curve, or the most samples where there is none.

        It follows the curve with some slack: a threshold that trembles would move samples back and forth.
        """
        found = curve.saturation_point(self._flatness) or self._most
        if self._threshold is None or abs(found - self._threshold) > _SLACK * self._threshold:
            self._threshold = found
        return self._threshold


def _convex(seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the largest convex curve that nowhere exceeds this one (its lower convex hull)."""
    corners: list[int] = []
    for at in range(len(seconds)):
        while len(corners) > 1:
            first, last = corners[-2:]
            rise = (seconds[last] - seconds[first]) * (at - first)
            if rise < (seconds[at] - seconds[first]) * (last - first):
                break
            corners.pop()
        corners.append(at)
    return np.interp(np.arange(len(seconds)), corners, seconds[corners])
