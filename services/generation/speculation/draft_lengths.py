"""Choose for which samples a draft model runs, and for how many steps. Pure.

A draft model costs one draft step per position, however few samples use it. So one depth k is chosen for all
samples that it drafts for, which are those that gain most over their other proposals. All depths, and many
numbers of samples, are compared by the predicted rate

    (samples + expected accepted tokens) / (predicted step + k predicted passes),

EfficientRollout's speedup (equation 1) for a batch in which only some samples are drafted for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from services.generation.engine.types import EngineSampleState
from services.generation.speculation.drafter import Proposals
from services.generation.speculation.plan import NOTHING, rooms
from services.generation.speculation.selection.selection import survivals
from services.step_time.estimator import StepTimeEstimator

Floats = NDArray[np.float64]
# Numbers of samples that are compared, at most.
_MAX_NUMBERS = 24
# Numbers of samples for which a pass is predicted; and its time before one was measured, in plain steps.
_MEASURED_PASSES, _ASSUMED_PASS = 6, 0.5


@dataclass(frozen=True, slots=True)
class DraftableBatch:
    """The samples of a step [n]: the most tokens to draft for each, and what they verify without the draft model.

    `rows` are the draft tokens of other drafters that they verify, `expected` how many of those are accepted.
    """

    room: NDArray[np.int64]
    rows: Floats
    expected: Floats
    context: int
    """Context length of all samples together, in tokens."""


@dataclass(frozen=True, slots=True)
class DraftLengths:
    """Tokens to draft for each sample [n], 0 for none, and the predicted gain as a factor."""

    tokens: NDArray[np.int64]
    gain: float = 1.0


def best_proposals(
    samples: Sequence[EngineSampleState], made: Sequence[Proposals], window: int, price: float
) -> tuple[Floats, Floats]:
    """Return (tokens, expected) [n] of each sample's best proposal, of tokens with survival >= `price`."""
    nothing = np.zeros(len(samples))
    if not made:
        return nothing, nothing
    survival = survivals(made, rooms(samples), window)
    survival[survival < max(price, NOTHING)] = 0.0
    expected = survival.sum(2)
    best = expected.argmax(0), np.arange(len(samples))
    return np.count_nonzero(survival[best], axis=1).astype(np.float64), expected[best]


def token_price(step_time: StepTimeEstimator, samples: int, context: int) -> float:
    """Return how many tokens plain decoding makes in the time of one more verified token."""
    plain, more = step_time.predict(samples, (samples, 2 * samples), context)
    return float((more - plain) / plain)


@cache
def _numbers(n: int) -> NDArray[np.int64]:
    """Return numbers from 1 to n, closer together where they are small."""
    return np.unique(np.geomspace(1, n, min(n, _MAX_NUMBERS)).round().astype(np.int64))


def choose_lengths(
    batch: DraftableBatch,
    acceptance: ArrayLike,
    step_time: StepTimeEstimator,
    pass_time: StepTimeEstimator,
    margin: float = 0.0,
) -> DraftLengths:
    """Return the depth and samples with the best predicted rate, if it gains more than `margin` over doing without.

    Args:
        batch: the samples of the step.
        acceptance: of a drafted token by position, if all before it were accepted [K].
        step_time: of the engine's step.
        pass_time: of a pass of the draft model; before the first was measured, half a plain step is assumed.
        margin: least gain, as a share.
    """
    survival = np.multiply.accumulate(np.asarray(acceptance, np.float64))
    n, most = len(batch.room), len(survival)
    nothing = DraftLengths(np.zeros(n, np.int64))
    if not n or not most or not (batch.room > 0).any():
        return nothing
    own = np.concatenate(([0.0], np.cumsum(survival)))
    # [K, n]: tokens of each sample at each depth, and the accepted tokens that it gains by them.
    depths = np.arange(1, most + 1)[:, None]
    lengths = np.minimum(depths, np.maximum(batch.room, 0))
    gains = own[lengths] - batch.expected
    # The samples that gain most at the greatest depth do at every other, except those that end before it.
    order = np.argsort(-gains[-1], kind="stable")
    used = _numbers(n)
    tokens = n + batch.expected.sum() + np.cumsum(gains[:, order], axis=1)[:, used - 1]
    rows = n + batch.rows.sum() + np.cumsum((lengths - batch.rows)[:, order], axis=1)[:, used - 1]
    plain = step_time.seconds(n, n, batch.context)
    drafting = depths * _pass_seconds(pass_time, used, batch.context / n, plain)
    # The step's time between some numbers of rows is taken as linear.
    grid = np.unique(np.geomspace(n, max(float(rows.max()), n + 1.0), _MAX_NUMBERS).round())
    verifying = np.interp(
        [*rows.ravel(), n + batch.rows.sum()], grid, step_time.predict(n, grid, batch.context)
    )
    rates = tokens / (verifying[:-1].reshape(rows.shape) + drafting)
    without = float(max(n / plain, (n + batch.expected.sum()) / verifying[-1]))
    depth, last = np.unravel_index(int(rates.argmax()), rates.shape)
    gain = float(rates[depth, last]) / without
    if not gain > 1 + margin:
        return nothing
    chosen = np.zeros(n, np.int64)
    drafted = order[: used[last]]
    chosen[drafted] = lengths[depth, drafted]
    return DraftLengths(chosen, gain)


def _pass_seconds(
    pass_time: StepTimeEstimator, samples: NDArray[np.int64], context: float, plain: float
) -> Floats:
    """Return the seconds of a pass for numbers of samples [k], rising, of mean length `context`."""
    if not pass_time.known:
        return np.full(len(samples), _ASSUMED_PASS * plain)
    some = np.unique(np.geomspace(1, samples[-1], _MEASURED_PASSES).round().astype(np.int64))
    seconds = [pass_time.seconds(int(each), int(each), each * context) for each in some]
    return np.interp(samples, some, seconds)
