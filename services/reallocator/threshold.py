"""How many samples an instance wants: the turning point of its throughput, after RLHFSpec (section 6.1). Pure.

Throughput over samples is a roofline: it grows in proportion while a step takes as long with one sample more, and
stands still once a step takes longer in proportion. The curve comes from the step-time model and is kept true by
the steps that are measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite, log
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

# Throughput is compared with that of so many times the samples: step by step, measured curves are uneven.
_WINDOW = 1.5
# Measured times are kept for counts of samples that differ by this factor.
_GRID = 1.25
# Weight of the newest report in what is remembered, and how far it may lie from that before it is cut.
_SMOOTHING, _SURPRISE = 0.2, 2.0
# A threshold in use is left as it is until the turning point is further away than this share of it.
_SLACK = 0.15
# Tokens: what a step takes to read fewer is hidden behind what it takes anyway.
_SHORTEST_READ = 64.0


class StepTimeModel(Protocol):
    """What is used of services.policy.step_time.StepTime."""

    def seconds(self, requests: ArrayLike, rows: ArrayLike, context: ArrayLike) -> NDArray[np.float64]:
        """Predicted time of steps."""


@dataclass(frozen=True, slots=True)
class Curve:
    """`seconds` of a step with 1, 2, ... samples; `tokens` that a step brings each of them (accepted + 1);
    `reading`: seconds by which each token of a context that is read in a step prolongs it, infinite where
    that is not known."""

    seconds: tuple[float, ...]
    tokens: float = 1.0
    reading: float = inf

    def reading_seconds(self, tokens: int) -> float:
        """By how much a step takes longer that reads a context of so many tokens."""
        return self.reading * max(0, tokens)

    def step_seconds(self, samples: int) -> float:
        """Of a step with so many samples: 0 for none; beyond the curve as if they took turns."""
        most = len(self.seconds)
        if samples <= 0:
            return 0.0
        if samples > most:
            return self.seconds[-1] * samples / most
        return self.seconds[samples - 1]

    def throughput(self, samples: int) -> float:
        """Tokens a second with so many samples (equation 4)."""
        return samples * self.tokens / self.step_seconds(samples) if samples > 0 else 0.0

    def finish_seconds(self, remaining: Sequence[float]) -> float:
        """Seconds until samples that have so many tokens to go are all done, fewer and fewer of them running."""
        total = before = 0.0
        for place, tokens in enumerate(sorted(remaining)):
            total += (tokens - before) / self.tokens * self.step_seconds(len(remaining) - place)
            before = tokens
        return total

    def turning_point(self, flatness: float) -> int | None:
        """The fewest samples from which on one per cent more of them bring less than `flatness` per cent more
        throughput. None when that is beyond the curve: every sample is still worth having."""
        counts = np.arange(1, len(self.seconds) + 1)
        throughput = counts / np.asarray(self.seconds)
        here = counts[:-1]
        there = np.minimum(np.maximum(here + 1, np.ceil(here * _WINDOW).astype(int)), len(self.seconds))
        gains = np.log(throughput[there - 1] / throughput[here - 1]) / np.log(there / here)
        flat = np.flatnonzero(gains < flatness)
        return int(flat[0]) + 1 if len(flat) else None


class Roofline:
    """The curve of an instance, or of several alike: a model's, bent to what they report. Lengths in tokens."""

    def __init__(self, model: StepTimeModel, most: int, flatness: float = 0.25) -> None:
        """`most` samples run at once."""
        self._model = model
        self._most = max(1, most)
        self._flatness = flatness
        self._tokens = 1.0
        self._context = 1.0
        self._threshold: int | None = None
        # Place on the grid -> samples, and measured over predicted time.
        self._measured: dict[int, tuple[float, float]] = {}

    def observe(self, samples: int, seconds: float, tokens: float, context: float) -> None:
        """A step with so many samples of a mean length `context` took `seconds` and brought each `tokens`; what
        cannot be is passed over."""
        usable = all(isfinite(each) for each in (seconds, tokens, context))
        if not usable or samples < 1 or seconds <= 0:
            return
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
        ratio = min(max(ratio, known[1] / _SURPRISE), known[1] * _SURPRISE)
        count, mean = known
        self._measured[place] = (
            count + (samples - count) * _SMOOTHING,
            mean + (ratio - mean) * _SMOOTHING,
        )

    def curve(self) -> Curve:
        """The curve by all that is known: between counts that were measured, the error of the model is
        interpolated; beyond them it stays.

        A step with fewer samples takes no longer, and each sample more adds no less than the one before it, as of a
        roofline. What was measured otherwise was disturbed, which only ever makes steps longer: it is cut off.
        """
        counts = np.arange(1, self._most + 1)
        seconds = self._model.seconds(counts, counts, counts * self._context)
        if self._measured:
            points = sorted(self._measured.values())
            measured, ratios = zip(*points, strict=True)
            seconds = seconds * np.interp(np.log(counts), np.log(measured), ratios)
            seconds = _convex(np.minimum.accumulate(seconds[::-1])[::-1])
        return Curve(tuple(float(each) for each in seconds), self._tokens, self._reading())

    def _reading(self) -> float:
        """For a context of the mean length: as far from the model as steps with many samples are."""
        tokens = max(_SHORTEST_READ, self._context)
        read, none = (float(self._model.seconds(1, rows, tokens)) for rows in (tokens, 1))
        ratio = max(self._measured.items())[1][1] if self._measured else 1.0
        return (read - none) / tokens * ratio if read > none else inf

    def threshold(self, curve: Curve) -> int:
        """The turning point of the curve, or all that run at once where there is none. It follows the curve with
        some slack: a threshold that trembles would send samples to and fro."""
        found = curve.turning_point(self._flatness) or self._most
        if self._threshold is None or abs(found - self._threshold) > _SLACK * self._threshold:
            self._threshold = found
        return self._threshold


def _convex(seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """The largest convex curve that is nowhere above this one."""
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
