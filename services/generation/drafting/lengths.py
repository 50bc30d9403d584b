"""For which samples a sequential drafter runs, and how many steps. Pure.

A drafter with a model of its own costs a step of it for every token deep, however few of the samples use it. So
one depth k is chosen for all samples that it is run for, which are those that gain most over what they have anyway.
All depths and numbers of samples (of many, some) are compared by the tokens a second that they promise:

    (samples + expected accepted) / (predicted step + k predicted draft steps)

which is EfficientRollout's speedup (equation 1) over a batch in which only some samples are drafted for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from services.generation.drafting.drafter import Offers
from services.generation.drafting.plan import NOTHING, rooms
from services.generation.drafting.selection import survivals
from services.generation.engine.types import SampleState

Floats = NDArray[np.float64]


class Seconds(Protocol):
    """Predicted times, such as a `StepTime`'s; the arguments broadcast."""

    def seconds(self, requests: ArrayLike, rows: ArrayLike, context: ArrayLike) -> Floats: ...


@dataclass(frozen=True, slots=True)
class Batch:
    """The samples of a step, [n] each: the most tokens that can be drafted, and what they have without.

    `rows` are the draft tokens that would be verified for them anyway, `expected` how many of those will be kept.
    """

    room: NDArray[np.int64]
    rows: Floats
    expected: Floats
    context: int
    """Tokens in all contexts together."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Draft tokens of each sample, [n], 0 where none are to be made, and the predicted gain, as a factor."""

    tokens: NDArray[np.int64]
    gain: float = 1.0


def standing(
    samples: Sequence[SampleState], made: Sequence[Offers], window: int, price: float
) -> tuple[Floats, Floats]:
    """(rows, expected), [n] each: of each sample's best offer, the tokens that survive with at least `price`."""
    nothing = np.zeros(len(samples))
    if not made:
        return nothing, nothing
    survival = survivals(made, rooms(samples), window)
    survival[survival < max(price, NOTHING)] = 0.0
    expected = survival.sum(2)
    best = expected.argmax(0), np.arange(len(samples))
    return np.count_nonzero(survival[best], axis=1).astype(np.float64), expected[best]


def row_price(step_time: Seconds, samples: int, context: int) -> float:
    """What the time of one more row would earn at the plain rate, in tokens."""
    seconds = step_time.seconds(samples, np.array([samples, samples + 1]), context)
    return float((seconds[1] - seconds[0]) * samples / seconds[0])


# Numbers of samples that are compared.
_MOST_NUMBERS = 24


@cache
def _numbers(n: int) -> NDArray[np.int64]:
    """Numbers from 1 to n, closer together where they are small."""
    return np.unique(np.geomspace(1, n, min(n, _MOST_NUMBERS)).round().astype(np.int64))


def choose_lengths(
    batch: Batch, acceptance: ArrayLike, step_time: Seconds, drafter_time: Seconds, margin: float = 0.0
) -> Lengths:
    """The depth and the samples that promise most, if that is more than a share of `margin` above doing without.

    Args:
        batch: the samples of the step.
        acceptance: of a drafted token by its place, if all before it were accepted, [K].
        step_time: of the engine's step.
        drafter_time: of a draft step.
        margin: the least gain, as a share.
    """
    survival = np.multiply.accumulate(np.asarray(acceptance, np.float64))
    n, most = len(batch.room), len(survival)
    nothing = Lengths(np.zeros(n, np.int64))
    if not n or not most or not (batch.room > 0).any():
        return nothing
    own = np.concatenate(([0.0], np.cumsum(survival)))
    # [K, n]: tokens of each sample at each depth, and what that gains it.
    depths = np.arange(1, most + 1)[:, None]
    lengths = np.minimum(depths, np.maximum(batch.room, 0))
    gains = own[lengths] - batch.expected
    # Who gains most at the greatest depth does at every other, but for samples that end before it.
    order = np.argsort(-gains[-1], kind="stable")
    used = _numbers(n)
    tokens = n + batch.expected.sum() + np.cumsum(gains[:, order], axis=1)[:, used - 1]
    rows = n + batch.rows.sum() + np.cumsum((lengths - batch.rows)[:, order], axis=1)[:, used - 1]
    drafting = depths * drafter_time.seconds(used, used, batch.context * used / n)
    rates = tokens / (step_time.seconds(n, rows, batch.context) + drafting)
    plain, offered = step_time.seconds(n, np.array([n, n + batch.rows.sum()]), batch.context)
    without = float(max(n / plain, (n + batch.expected.sum()) / offered))
    depth, last = np.unravel_index(int(rates.argmax()), rates.shape)
    gain = float(rates[depth, last]) / without
    if not gain > 1 + margin:
        return nothing
    chosen = np.zeros(n, np.int64)
    drafted = order[: used[last]]
    chosen[drafted] = lengths[depth, drafted]
    return Lengths(chosen, gain)
