"""Prior of the step-time estimator: what a sweep of the engine says of steps that were not measured yet. Pure.

A sweep measures short contexts, plain decoding and verification, at some numbers of samples and of verified tokens
(rows). Its times are taken as

    plain(samples)                                                  without drafts,
    max(plain(samples), by_rows(rows) + per_sample * samples + v)   with drafts,

with `plain` and `by_rows` piecewise linear between what was measured and never falling. That is no model of a
network or a device: which weights a row touches, tiles, graphs and links are all in the two lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

Floats = NDArray[np.float64]
# Weight of the assumption that neighbouring pieces of `by_rows` have the same slope, against measured times. Small:
# it only decides where the points leave a choice.
_SMOOTHNESS = 1e-3
# Weight of a plain step among those that verification is fitted to.
_PLAIN_WEIGHT = 0.3
# Least part of the shortest step that the rows take.
_LEAST = 1 / 16
# Without a sweep: the time of a step of one row; one of so many rows takes twice that.
_UNKNOWN_SECONDS, _UNKNOWN_ROWS = 1e-2, 256.0
# Tokens of context that take as long to read as a step of one sample: a scale for what is learned of contexts.
_CONTEXT_TOKENS = 32768.0


class MeasuredStep(BaseModel):
    """Shape of a step, and the seconds that it took."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    samples: int = Field(ge=1)
    rows: int = Field(ge=1)
    context: int = Field(ge=0)
    seconds: float = Field(gt=0, allow_inf_nan=False)


class StepTimePrior(NamedTuple):
    """Step time by rows and samples at short contexts, as the compiled functions read it."""

    corners: Floats
    """Of `by_rows` [2, k]: rows, which rise, and seconds; two at least."""
    plains: Floats
    """Of `plain` [2, k]: samples and seconds."""
    per_sample: float
    """Seconds of a sample in a verifying step."""
    verifying: float
    """Seconds of any verification."""
    per_token: float
    """Scale of the seconds of a token of context."""

    @classmethod
    def unknown(cls, seconds: float = _UNKNOWN_SECONDS) -> Self:
        """Return the prior of an engine of which one step is known, or none."""
        line = np.array([[1.0, _UNKNOWN_ROWS], [seconds, 2 * seconds]])
        return cls(line, line, 0.0, 0.0, seconds / _CONTEXT_TOKENS)

    @classmethod
    def of(cls, sweep: Sequence[MeasuredStep]) -> Self:
        """Return the prior that fits a sweep best, by relative least squares."""
        plain = sorted((each.samples, each.seconds) for each in sweep if each.rows == each.samples)
        samples = np.unique([float(each) for each, _ in plain])
        if len(samples) < 2:
            return cls.unknown(plain[0][1]) if plain else cls.unknown()
        seconds = [min(time for n, time in plain if n == each) for each in samples]
        plains = np.array([samples, rising(seconds)])
        corners, per_sample, verifying = _by_rows(sweep)
        return cls(corners, plains, per_sample, verifying, seconds[0] / _CONTEXT_TOKENS)


def rising(values: Sequence[float] | Floats) -> Floats:
    """Return the values with each run that falls replaced by its mean: isotonic regression by pooling neighbours.

    A running maximum would keep each time that noise made too long, for all larger steps up to the next longer one.
    """
    # Sum and number of the values that are pooled.
    pools: list[tuple[float, int]] = []
    for value in values:
        total, count = float(value), 1
        while pools and pools[-1][0] * count >= total * pools[-1][1]:
            more, number = pools.pop()
            total, count = total + more, count + number
        pools.append((total, count))
    return np.repeat([total / count for total, count in pools], [count for _, count in pools])


def _by_rows(sweep: Sequence[MeasuredStep]) -> tuple[Floats, float, float]:
    """Return the corners of `by_rows`, and the terms of samples and of any verification."""
    shapes = [(each.samples, each.rows, each.seconds) for each in sweep]
    samples, rows, seconds = np.array(shapes, np.float64).T
    corners, verifying = np.unique(rows), rows > samples
    # Hat functions: the share of each corner in the time of a step.
    hats = np.array([np.interp(rows, corners, one) for one in np.eye(len(corners))]).T
    # What is measured of verification goes before what plain steps say of it.
    weights = np.where(verifying, 1.0, _PLAIN_WEIGHT) / seconds
    design = np.column_stack([hats, samples, verifying]) * weights[:, None]
    slopes = np.diff(np.eye(len(corners)), axis=0) / np.diff(corners)[:, None]
    bends = np.diff(slopes, axis=0) * corners[1:-1, None] / seconds.min()
    left = np.vstack([design, _SMOOTHNESS * np.pad(bends, ((0, 0), (0, 2)))])
    right = np.concatenate([weights * seconds, np.zeros(len(bends))])
    solved = np.linalg.lstsq(left, right, rcond=None)[0]
    by_rows = np.maximum(rising(solved[:-2]), _LEAST * seconds.min())
    return np.array([corners, by_rows]), float(solved[-2]), float(solved[-1])
