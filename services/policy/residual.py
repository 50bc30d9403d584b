"""What a step-time model leaves over of measured times: by batch, length and draft length. Pure.

Rooflines and a few terms say how a step's time goes on the whole. How long kernels really take goes up and down
around that with the shape of a step, by several per cent, and comes out the same each time it is measured: so it
can be learned, and looked up.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

Floats = NDArray[np.float64]
DRAFTS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Draft tokens a sample for which a share is kept."""
SAME = 1e-9
"""Predictions that differ by no more than this share are the same."""
# Most that is believed to be left over, as a share.
_MOST = 0.5
# How far apart steps are that have little to do with each other: in octaves of samples, of their length, and of
# rows a sample. Other kernels run in a step with drafts than in a plain one, which counts for half as much.
_SCALES = (1.0, 1.5, 1.0, 2.0)
# Variances of the measurement that are tried, as multiples of that of what is left over; each has to describe steps
# better than the last by so much.
_NOISES, _CLEARLY = (3.0, 1.0, 0.3, 0.1, 0.03), 0.95
_LENGTHS = 4

Axis = Annotated[tuple[Annotated[float, Field(gt=0)], ...], Field(min_length=1)]
Share = Annotated[float, Field(gt=-1)]


class Residual(BaseModel):
    """Shares of the predicted time that measured steps take beyond it.

    Between batches and lengths it is interpolated along their logarithms, and beyond the outermost it is as there.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    requests: Axis
    """Samples, rising."""
    lengths: Axis
    """Mean length of a sample, in tokens, rising."""
    shares: tuple[tuple[tuple[Share, ...], ...], ...]
    """By samples, length, and `DRAFTS`."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for axis in (self.requests, self.lengths):
            if any(after <= before for before, after in pairwise(axis)):
                raise ValueError("the axes of a residual have to rise")
        wanted = [[len(DRAFTS)] * len(self.lengths)] * len(self.requests)
        if [[len(row) for row in plane] for plane in self.shares] != wanted:
            shape = f"{len(self.requests)} x {len(self.lengths)} x {len(DRAFTS)}"
            raise ValueError(f"the shares of a residual have to be {shape}")
        return self

    @classmethod
    def learned(cls, requests: Floats, lengths: Floats, drafts: Floats, shares: Floats) -> Self | None:
        """From points, [n] each: `shares` of the predicted time were measured beyond it.

        Ridge regression on a Gaussian kernel. How much of it is noise is found by leaving each point out once;
        None where all of it is.
        """
        inputs = _features(requests, lengths, drafts)
        kernel = _kernel(inputs, inputs)
        best, least = None, float(np.square(shares).mean())
        for noise in _NOISES:
            inverse = np.linalg.inv(kernel + noise * np.eye(len(shares)))
            weights = inverse @ shares
            # What each point is missed by when it is left out.
            error = float(np.square(weights / np.diag(inverse)).mean())
            if error < _CLEARLY * least:
                best, least = weights, error
        if best is None:
            return None
        batches = np.unique(requests)
        spread = np.unique(np.geomspace(lengths.min(), lengths.max(), _LENGTHS))
        grid = np.meshgrid(batches, spread, np.array(DRAFTS), indexing="ij")
        found = _kernel(_features(*map(np.ravel, grid)), inputs) @ best
        table = np.clip(found, -_MOST, _MOST).round(4).reshape(grid[0].shape)
        return cls.model_validate(
            {"requests": batches.tolist(), "lengths": spread.tolist(), "shares": table.tolist()}
        )

    def of(self, requests: ArrayLike, lengths: ArrayLike) -> Floats:
        """The shares by `DRAFTS` in a last dimension; the arguments broadcast."""
        table = np.array(self.shares)
        i, across = _places(self.requests, requests)
        j, along = _places(self.lengths, lengths)
        across, along = across[..., None], along[..., None]
        next_i, next_j = np.minimum(i + 1, len(table) - 1), np.minimum(j + 1, table.shape[1] - 1)
        low = (1 - along) * table[i, j] + along * table[i, next_j]
        high = (1 - along) * table[next_i, j] + along * table[next_i, next_j]
        return (1 - across) * low + across * high


def corrected(predicted: Floats, at_drafts: Floats, shares: Floats) -> Floats:
    """Times of steps by what is predicted for them; what is at `DRAFTS`, and its shares, in a last dimension.

    At each of `at_drafts`, which rise, a time is longer by its share, but not shorter than the one before. Between
    them are straight lines, and the last one goes on. Of predictions that are the same the first counts.
    """
    start, time = at_drafts[..., 0], at_drafts[..., 0] * (1 + shares[..., 0])
    found = time
    for k in range(1, len(DRAFTS)):
        seconds = at_drafts[..., k]
        width = seconds - start
        apart = width > SAME * seconds
        later = np.where(apart, np.maximum(time, seconds * (1 + shares[..., k])), time)
        part = np.clip((predicted - start) / np.where(apart, width, 1.0), 0.0, 1.0)
        found = found + (later - time) * part
        start, time = np.where(apart, seconds, start), later
    return np.asarray(found + np.maximum(predicted - start, 0.0) * time / start)


def _features(requests: Floats, lengths: Floats, drafts: Floats) -> Floats:
    columns = (np.log2(requests), np.log2(lengths), np.log2(1 + drafts), drafts > 0)
    return np.stack([column / scale for column, scale in zip(columns, _SCALES, strict=True)], axis=1)


def _kernel(left: Floats, right: Floats) -> Floats:
    return np.asarray(np.exp(-0.5 * np.square(left[:, None] - right[None]).sum(-1)))


def _places(axis: Sequence[float], values: ArrayLike) -> tuple[NDArray[np.int64], Floats]:
    """Of each the last of an axis that is not above it, and how far it is from there to the next."""
    inside = np.clip(np.asarray(values, np.float64), axis[0], axis[-1])
    place = np.interp(np.log2(inside), np.log2(axis), np.arange(len(axis)))
    i = np.floor(place).astype(np.int64)
    return i, place - i
