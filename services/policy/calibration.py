"""Fits the step-time model to a sweep, in the three stages of EfficientRollout's appendix D.2. Pure.

1. Throughput comes from a micro-benchmark of matrix products. Whatever else a machine does can only lower it: a
   few multiples of it are tried, and one is taken where it describes the fitted points clearly better.
2. Bandwidth, KV scale, base and time per request are fitted together to plain decoding.
3. With these fixed, what draft tokens take is fitted to verification.

Then what is left over is learned (see `residual`), where that describes steps better that it was not learned from.

All errors are relative. With bandwidth and KV scale given, the rest of stage 2 is least squares of two
non-negative numbers, in closed form; so the two are searched for on a grid that closes in on the best.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np

from services.policy.residual import Residual
from services.policy.step_time import Architecture, StepTime
from services.policy.sweep import Sweep

_GRID = 25
_ROUNDS = 8
# Half the first grid's width, in octaves. Weights in a cache are read faster than memory; on CPUs attention takes
# many times what reading the KV would.
_BANDWIDTH_OCTAVES, _KV_OCTAVES = 4.0, 12.0
# Time that bandwidth and base can explain equally well goes to the base: mean squared relative error per octave^2
# that the bandwidth is away from the measured one, and the KV traffic from the KV's size.
_PULL = 1e-6
_LEAST_PLAIN, _LEAST_VERIFY, _LEAST_HELD_OUT = 4, 3, 2
_MULTIPLES, _CLEARLY = (1.5, 2.0, 3.0, 4.0), 0.9
_VERIFICATION = ("per_row", "per_attended_token", "verify_per_request")


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors of predictions, |predicted - measured| / measured."""

    median: float
    p90: float
    points: int

    @classmethod
    def of(cls, predicted: np.ndarray, measured: np.ndarray) -> Errors:
        """Of [n] predictions."""
        errors = np.abs(predicted - measured) / measured
        return cls(float(np.median(errors)), float(np.quantile(errors, 0.9)), len(errors))

    def __str__(self) -> str:
        return f"median {self.median:.1%}, p90 {self.p90:.1%} of {self.points} points"


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted model, its errors, and what it says of each point of the sweep, [n] seconds."""

    step_time: StepTime
    fitted: Errors
    held_out: Errors
    predicted: np.ndarray


class TooFewPoints(ValueError):
    """The sweep does not determine the model."""


class BadFit(ValueError):
    """The model does not describe the machine: `fit` holds the figures."""

    def __init__(self, fit: Fit, median: float, p90: float) -> None:
        self.fit = fit
        super().__init__(
            f"step times held out from the fit are off by {fit.held_out};"
            f" allowed are median {median:.0%}, p90 {p90:.0%}"
        )


def calibrate(architecture: Architecture, throughput: float, bandwidth: float, sweep: Sweep) -> Fit:
    """Fit the model to the points of the sweep that are not held out.

    Args:
        architecture: the model's.
        throughput: operations a second of large matrix products, as measured; the machine may do more.
        bandwidth: bytes a second of large copies, as measured; where the search begins.

    Raises:
        TooFewPoints: fewer points than parameters, or none held out to judge by.
    """
    seen, plain = ~sweep.held_out, sweep.plain
    counts = (int((seen & plain).sum()), int((seen & ~plain).sum()), int((~seen).sum()))
    if any(
        have < need for have, need in zip(counts, (_LEAST_PLAIN, _LEAST_VERIFY, _LEAST_HELD_OUT), strict=True)
    ):
        raise TooFewPoints("{} plain, {} verifying and {} held-out points are too few".format(*counts))
    measured = sweep.column("seconds")

    def fitted(multiple: float) -> tuple[StepTime, float]:
        start = StepTime(architecture=architecture, throughput=multiple * throughput, bandwidth=bandwidth)
        found = _fit_rows(_fit_plain(start, sweep, seen & plain), sweep, seen & ~plain)
        return found, float(np.square(_predict(found, sweep) / measured - 1)[seen].mean())

    model, least = fitted(1.0)
    for multiple in _MULTIPLES:
        tried, error = fitted(multiple)
        if error < _CLEARLY * least:
            model, least = tried, error
    model = _with_residual(model, sweep, seen)
    predicted = _predict(model, sweep)
    return Fit(
        model,
        Errors.of(predicted[seen], measured[seen]),
        Errors.of(predicted[~seen], measured[~seen]),
        predicted,
    )


def require_good(fit: Fit, median: float, p90: float) -> None:
    """Refuse a fit whose held-out errors are above these. Raises `BadFit`."""
    if not (fit.held_out.median <= median and fit.held_out.p90 <= p90):
        raise BadFit(fit, median, p90)


def _predict(model: StepTime, sweep: Sweep) -> np.ndarray:
    return model.seconds(sweep.column("requests"), sweep.column("rows"), sweep.column("context"))


def _fit_rows(model: StepTime, sweep: Sweep, chosen: np.ndarray) -> StepTime:
    """Stage 3: what is left of verification, as a combination of its three terms."""
    measured, requests, rows, context = (
        sweep.column(name)[chosen] for name in ("seconds", "requests", "rows", "context")
    )
    terms = []
    for name in _VERIFICATION:
        unit = model.model_copy(update={**dict.fromkeys(_VERIFICATION, 0.0), name: 1.0})
        terms.append(unit.verification_seconds(requests, rows - requests, context) / measured)
    missing = 1 - _predict(model, sweep)[chosen] / measured
    solved = _non_negative(np.stack(terms), missing)
    return model.model_copy(update=dict(zip(_VERIFICATION, solved, strict=True)))


def _with_residual(model: StepTime, sweep: Sweep, chosen: np.ndarray) -> StepTime:
    seconds, requests, rows, context = (
        sweep.column(name)[chosen] for name in ("seconds", "requests", "rows", "context")
    )
    shares = seconds / _predict(model, sweep)[chosen] - 1
    # No sample is shorter than a token.
    lengths = np.maximum(context / requests, 1.0)
    residual = Residual.learned(requests, lengths, rows / requests - 1, shares)
    return model.model_copy(update={"residual": residual})


def _non_negative(design: np.ndarray, target: np.ndarray) -> list[float]:
    """Least squares of x @ design = target with x >= 0, for few unknowns: the best of all sets of positive ones."""
    best, least = np.zeros(len(design)), float(target @ target)
    for chosen in product((False, True), repeat=len(design)):
        if not any(chosen):
            continue
        part = design[list(chosen)]
        solved = np.linalg.lstsq(part.T, target, rcond=None)[0]
        error = float(((solved @ part - target) ** 2).sum())
        if (solved >= 0).all() and error < least:
            best, least = np.zeros(len(design)), error
            best[list(chosen)] = solved
    return [float(each) for each in best]


def _fit_plain(start: StepTime, sweep: Sweep, chosen: np.ndarray) -> StepTime:
    """Stage 2: bandwidth and KV scale by search, base and seconds per request in closed form."""
    measured, requests = sweep.column("seconds")[chosen], sweep.column("requests")[chosen]
    context = sweep.column("context")[chosen]
    of = start.architecture
    dense = requests * of.dense_flops / start.throughput
    attention = context * of.attention_flops / start.throughput
    design = np.stack([1 / measured, requests / measured])
    octaves, half = np.zeros(2), np.array([_BANDWIDTH_OCTAVES, _KV_OCTAVES])
    best = np.zeros(2)
    for _ in range(_ROUNDS):
        bandwidths, scales = (np.linspace(-each, each, _GRID) for each in half)
        away_b, away_s = np.meshgrid(octaves[0] + bandwidths, octaves[1] + scales, indexing="ij")
        per_byte = 2.0 ** -away_b[..., None] / start.bandwidth
        weights = np.maximum(per_byte * of.weight_bytes, dense)
        kv = np.maximum(per_byte * 2.0 ** away_s[..., None] * of.kv_bytes * context, attention)
        target = 1 - (weights + kv) / measured
        solved, loss = _two_non_negative(design, target)
        loss = loss / len(measured) + _PULL * (away_b**2 + away_s**2)
        place = np.unravel_index(int(np.argmin(loss)), loss.shape)
        octaves = np.array([away_b[place], away_s[place]])
        best = solved[place]
        half = half / 3
    return start.model_copy(
        update={
            "bandwidth": float(start.bandwidth * 2 ** octaves[0]),
            "kv_scale": float(2 ** octaves[1]),
            "base": float(best[0]),
            "per_request": float(best[1]),
        }
    )


def _two_non_negative(design: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Least squares of x @ design = target with x >= 0: x [..., 2] and the squared error [...].

    With two unknowns the best is among four: both positive, either alone, none.
    """
    gram = design @ design.T
    right = target @ design.T
    first = np.maximum(right[..., 0] / gram[0, 0], 0)
    second = np.maximum(right[..., 1] / gram[1, 1], 0)
    zero = np.zeros_like(first)
    candidates = [(zero, zero), (first, zero), (zero, second)]
    determinant = gram[0, 0] * gram[1, 1] - gram[0, 1] ** 2
    if determinant > 1e-12 * gram[0, 0] * gram[1, 1]:
        a = (gram[1, 1] * right[..., 0] - gram[0, 1] * right[..., 1]) / determinant
        b = (gram[0, 0] * right[..., 1] - gram[0, 1] * right[..., 0]) / determinant
        inside = (a >= 0) & (b >= 0)
        # Where it is outside, "none" stands in for it.
        candidates.append((np.where(inside, a, 0), np.where(inside, b, 0)))
    x = np.stack([np.stack(each, -1) for each in candidates])
    error = (target**2).sum(-1) - 2 * (x * right).sum(-1) + np.einsum("...i,ij,...j->...", x, gram, x)
    best = np.argmin(error, axis=0)[None]
    chosen = np.take_along_axis(x, best[..., None], axis=0)[0]
    return chosen, np.take_along_axis(error, best, axis=0)[0]
