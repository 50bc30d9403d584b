"""Model the throughput of an instance: its step time, its measured curve and its saturation point (RLHFSpec, 6.1).

Throughput over the number of samples is a roofline: it grows in proportion while one more sample does not prolong
a step, and stays constant once steps grow in proportion. The curve starts from a step-time model and is corrected
by measured steps. Pure: times are passed in (monotonic seconds).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite, log
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import BaseModel, ConfigDict, Field

from paceline.files import read_object

# Assumed for an unmeasured machine: modest compute, with the memory bandwidth of a CPU or a small GPU.
_THROUGHPUT, _BANDWIDTH, _BASE, _PER_ROW = 1e12, 5e10, 2e-3, 4e-5
_VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_MIXTURE_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")


class UnsupportedArchitecture(ValueError):
    """Raised for a model that is no dense transformer, or whose config lacks its sizes."""


class Architecture(BaseModel):
    """Memory traffic and compute of a forward pass, in bytes and floating-point operations."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    weight_bytes: float = Field(gt=0)
    """Weights that every step reads, the head included, the embedding not."""
    kv_bytes: float = Field(gt=0)
    """KV of one token in all layers."""
    dense_flops: float = Field(gt=0)
    """Projections and head, for each row."""
    attention_flops: float = Field(gt=0)
    """Attention, for each row and token before it."""

    @classmethod
    def of(cls, config: Mapping[str, Any], value_bytes: int) -> Self:
        """Return the architecture of a Hugging Face config, with `value_bytes` per weight and KV value.

        Raises:
            UnsupportedArchitecture: a mixture of experts, or a config without the sizes of a dense model.
        """
        if any(config.get(key) for key in _MIXTURE_KEYS):
            raise UnsupportedArchitecture("a mixture of experts has no step-time model")
        hidden, layers = _size(config, "hidden_size"), _size(config, "num_hidden_layers")
        heads = _size(config, "num_attention_heads")
        kv_heads = _size(config, "num_key_value_heads", heads)
        width = _size(config, "head_dim", hidden // heads)
        attention = 2 * hidden * width * (heads + kv_heads)
        layer = attention + 3 * hidden * _size(config, "intermediate_size")
        weights = layers * layer + hidden * _size(config, "vocab_size")
        return cls(
            weight_bytes=weights * value_bytes,
            kv_bytes=2 * layers * kv_heads * width * value_bytes,
            dense_flops=2 * weights,
            attention_flops=4 * layers * heads * width,
        )


class StepTime(BaseModel):
    """Roofline of the step time in seconds, by the sizes of the model.

    A step has a row (verified token) for each sample. Its dense layers read the weights and compute with each row;
    its attention reads the KV cache and computes with each row and the tokens before it. Each of the two takes as
    long as the longer of its memory and compute time. Only the shape counts: measured steps set the scale.
    `context` is the sum of the samples' lengths in tokens.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    architecture: Architecture
    throughput: float = Field(default=_THROUGHPUT, gt=0)
    bandwidth: float = Field(default=_BANDWIDTH, gt=0)
    base: float = Field(default=_BASE, ge=0)
    per_row: float = Field(default=_PER_ROW, ge=0)

    def seconds(self, requests: ArrayLike, rows: ArrayLike, context: ArrayLike) -> NDArray[np.float64]:
        """Return the predicted time; the arguments broadcast. A step without rows takes no time."""
        n, r, c = (np.asarray(each, np.float64) for each in (requests, rows, context))
        of = self.architecture
        dense = np.maximum(of.weight_bytes / self.bandwidth, r * of.dense_flops / self.throughput)
        row = of.attention_flops * c / np.maximum(n, 1.0) / self.throughput
        attention = np.maximum(of.kv_bytes * c / self.bandwidth, r * row)
        return np.asarray((dense + attention + self.base + self.per_row * r) * (r > 0))


def architecture_of(model: Path, dtype: str) -> Architecture:
    """Return the architecture of a model folder in Hugging Face layout.

    Raises:
        UnsupportedArchitecture: no dense model, a config that cannot be read, or a dtype of unknown size.
    """
    if dtype not in _VALUE_BYTES:
        raise UnsupportedArchitecture(f"the size of {dtype} is not known")
    try:
        config = read_object(model / "config.json")
    except (OSError, ValueError) as error:
        raise UnsupportedArchitecture(f"{model} has no config to read: {error}") from error
    return Architecture.of(config, _VALUE_BYTES[dtype])


def _size(config: Mapping[str, Any], name: str, otherwise: int | None = None) -> int:
    found = config.get(name)
    if found is None:
        found = otherwise
    if not isinstance(found, int) or found < 1:
        raise UnsupportedArchitecture(f"the model's config has no usable {name}: {found!r}")
    return found


# Throughput is compared at this factor between numbers of samples, because measured curves are locally uneven.
_WINDOW = 1.5
# Measured times are kept for counts of samples that differ by this factor.
_GRID = 1.25
# Weight of the newest measurement in the running mean, and the ratio to the mean at which it is clipped.
_SMOOTHING, _OUTLIER_RATIO = 0.2, 2.0
# A threshold stays until the saturation point differs from it by more than this share.
_SLACK = 0.15
# Tokens. A shorter prefill is hidden in the time that a step takes anyway.
_SHORTEST_PREFILL = 64.0


StepSeconds = Callable[[ArrayLike, ArrayLike, ArrayLike], NDArray[np.float64]]
"""Predicted seconds of steps, from their requests, rows and context: `StepTime.seconds`, or a measured table."""


@dataclass(frozen=True, slots=True)
class ThroughputCurve:
    """Step time over the number of samples, and the throughput that follows from it.

    `seconds` has the step times with 1, 2, ... samples; `tokens` is the number that a step brings each sample
    (acceptance length); `prefill` is the time by which each prefilled token prolongs a step, infinite if unknown.
    """

    seconds: tuple[float, ...]
    tokens: float = 1.0
    prefill: float = inf

    def prefill_seconds(self, tokens: int) -> float:
        """Return the time by which prefilling `tokens` tokens prolongs a step."""
        return self.prefill * max(0, tokens)

    def step_seconds(self, samples: int) -> float:
        """Return the time of a step: 0 without samples; beyond the curve as if samples took turns."""
        most = len(self.seconds)
        if samples <= 0:
            return 0.0
        if samples > most:
            return self.seconds[-1] * samples / most
        return self.seconds[samples - 1]

    def throughput(self, samples: int) -> float:
        """Return the tokens per second with `samples` samples (equation 4)."""
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

    def __init__(self, model: StepSeconds, most: int, flatness: float = 0.25) -> None:
        """Start from a model, for instances that run at most `most` samples at once."""
        self._model = model
        self._most = max(1, most)
        self._flatness = flatness
        self._tokens = 1.0
        self._context = 1.0
        self._threshold: int | None = None
        # Curve that it is of.
        self._rated: ThroughputCurve | None = None
        # Kept until the next measurement, because many instances share it.
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
        predicted = float(self._model(samples, samples, samples * self._context))
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
        previous one. Measurements above it were disturbed, because disturbances only prolong steps.
        """
        if self._curve is None:
            self._curve = self._fitted()
        return self._curve

    def _fitted(self) -> ThroughputCurve:
        counts = np.arange(1, self._most + 1)
        seconds = self._model(counts, counts, counts * self._context)
        if self._measured:
            points = sorted(self._measured.values())
            measured, ratios = zip(*points, strict=True)
            seconds = seconds * np.interp(np.log(counts), np.log(measured), ratios)
            seconds = _convex(np.minimum.accumulate(seconds[::-1])[::-1])
        return ThroughputCurve(tuple(float(each) for each in seconds), self._tokens, self._prefill())

    def _prefill(self) -> float:
        """Return the prefill time per token at the mean length, with the error of the largest batches."""
        tokens = max(_SHORTEST_PREFILL, self._context)
        with_prefill, without = (float(self._model(1, rows, tokens)) for rows in (tokens, 1))
        ratio = max(self._measured.items())[1][1] if self._measured else 1.0
        return (with_prefill - without) / tokens * ratio if with_prefill > without else inf

    def threshold(self, curve: ThroughputCurve) -> int:
        """Return the saturation point of the curve, or the most samples where there is none.

        It follows the curve with some slack: a jittering threshold would move samples back and forth.
        """
        if self._threshold is not None and curve is self._rated:
            return self._threshold
        found, self._rated = curve.saturation_point(self._flatness) or self._most, curve
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


@dataclass(frozen=True, slots=True)
class InstanceReport:
    """Counters of an instance at one time."""

    at: float
    samples: int
    steps: int
    tokens: int


@dataclass(frozen=True, slots=True)
class SteadyPace:
    """Steps, step time, and tokens per step and sample between two reports with the same `samples`."""

    samples: int
    steps: int
    step_seconds: float
    tokens_per_step: float


def pace(before: InstanceReport, after: InstanceReport) -> SteadyPace | None:
    """Return the pace between two reports.

    None if the number of samples changed, no step was made, or the counters were reset.
    """
    steps, tokens, seconds = after.steps - before.steps, after.tokens - before.tokens, after.at - before.at
    if before.samples != after.samples or after.samples < 1 or steps < 1 or tokens < 0 or seconds <= 0:
        return None
    return SteadyPace(after.samples, steps, seconds / steps, max(1.0, tokens / steps / after.samples))


def steady(reports: Sequence[InstanceReport], since: float = float("-inf")) -> SteadyPace | None:
    """Return the pace over the last reports since `since` that have the same number of samples."""
    found: list[InstanceReport] = []
    for report in reversed(reports):
        if report.at < since or report.samples != reports[-1].samples:
            break
        found.append(report)
    return pace(found[-1], found[0]) if found else None


def tokens_per_second(before: InstanceReport, after: InstanceReport) -> float:
    """Return the mean tokens per second between two reports; 0 if unknown."""
    seconds, tokens = after.at - before.at, after.tokens - before.tokens
    return tokens / seconds if seconds > 0 and tokens > 0 else 0.0


def step_seconds(before: InstanceReport, after: InstanceReport) -> float:
    """Return the mean seconds of an engine step between two reports; 0 if unknown."""
    seconds, steps = after.at - before.at, after.steps - before.steps
    return seconds / steps if seconds > 0 and steps > 0 else 0.0


def settled(reports: Sequence[InstanceReport], since: float = float("-inf")) -> list[InstanceReport]:
    """Return the last reports since `since` between which the instance was busy, or idle, all the time.

    The first busy report is left out, because the work began at an unknown time before it.
    """
    found: list[InstanceReport] = []
    for report in reversed(reports):
        if report.at < since or bool(report.samples) != bool(reports[-1].samples):
            break
        found.append(report)
    began = len(found) < len(reports) and reports[-len(found) - 1].at >= since
    if found and found[0].samples and (began or len(found) == len(reports)):
        found.pop()
    return found[::-1]


def mean_samples(reports: Sequence[InstanceReport]) -> float:
    """Return the mean number of samples over these reports; 0 without reports."""
    return sum(each.samples for each in reports) / len(reports) if reports else 0.0


def lost_seconds(before: InstanceReport, after: InstanceReport, step_seconds: float) -> float | None:
    """Return the time between two reports in excess of `step_seconds` a step; None if the instance was idle."""
    if not before.samples or not after.samples or step_seconds <= 0 or after.at <= before.at:
        return None
    return after.at - before.at - (after.steps - before.steps) * step_seconds


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens per second of a pair of instances, the longer of their step times, and the mean samples of each."""

    tokens_per_second: float
    step_seconds: float
    donor: float
    receiver: float


def achieved_gain(before: Speed, after: Speed, moved: int, curve: ThroughputCurve) -> float | None:
    """Return the gain in tokens per second over the same pair without the moves; None if too little is left.

    Samples end meanwhile, moved or not. The reference is therefore the pair with the moved samples that still run
    back at the donor: its throughput by the curve, scaled by how far the pair was from the curve before.
    """
    were, are = before.donor + before.receiver, after.donor + after.receiver
    predicted = _rate(curve, before.donor) + _rate(curve, before.receiver)
    if are < 1 or not were or predicted <= 0 or before.tokens_per_second <= 0:
        return None
    back = min(moved * min(1.0, are / were), after.receiver)
    unmoved = _rate(curve, after.donor + back) + _rate(curve, after.receiver - back)
    return after.tokens_per_second / (unmoved * before.tokens_per_second / predicted) - 1


def _rate(curve: ThroughputCurve, samples: float) -> float:
    """Return the tokens per second, interpolated between whole numbers of samples."""
    low = int(samples)
    share = samples - low
    return curve.throughput(low) * (1 - share) + (curve.throughput(low + 1) * share if share else 0.0)
