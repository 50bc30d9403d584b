"""Offers as the survival of their tokens, and what is chosen of them.

A step waits for this, for a handful of samples as for many, and a dozen operations on small arrays take longer than
all of it compiled. numba is imported when it is first used, which must be after vLLM was.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from services.generation.drafting.drafter import Offers
from services.generation.drafting.row_grid import row_counts
from services.policy.curve import Curve
from services.policy.curve import warm_up as warm_up_curve

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
# Flaws, as compiled code has them.
_TOKENS, _ACCEPTANCE = 1, 2


class Chosen(NamedTuple):
    """For each sample, [n], the place of its drafter and the number of its tokens; what is expected of all."""

    picks: Ints
    lengths: Ints
    expected: float


class Rated(NamedTuple):
    """A number of tokens, 0 for none: the rate, in tokens a second, how many are expected to be kept, what the step
    takes, and what each of the last rows adds to that, in seconds."""

    tokens: int
    rate: float
    expected: float
    seconds: float
    row: float


@cache
def _compiled() -> ModuleType:
    from services.generation.drafting.selection import compiled

    return compiled


def warm_up() -> None:
    """Compile, or load what was compiled, so that the first step does not pay for it."""
    for kind in (np.int32, np.int64):
        flaw(Offers(np.zeros((1, 1), kind), np.ones((1, 1))), 1)
    survival = survivals([Offers(np.zeros((1, 1), np.int32), np.ones((1, 1)))], np.ones(1, np.int64), 1)
    longest(survival, 0.0, 0.0)
    line = Line(survival, best_picks(survival, 0.0), 0.5)
    # Of a grid, and not to be written to.
    counts, curve = row_counts(1, 1), warm_up_curve()
    least_row(counts, curve)
    line.evaluate(counts, curve)
    line.cut(1)


def flaw(offers: Offers, vocab_size: int) -> str:
    """What is wrong with the numbers of offers, whose shapes are right; or ""."""
    tokens, acceptance = offers.tokens, offers.acceptance
    found = _TOKENS if tokens.dtype.kind not in "iu" else _ACCEPTANCE if acceptance.dtype.kind != "f" else 0
    if not found:
        if tokens.dtype.char != "i":
            # What is too large for these is as far outside as a negative number.
            tokens = tokens.astype(np.int64)
        found = _compiled().flaw(np.ascontiguousarray(tokens), _doubles(acceptance), vocab_size)
    if found == _TOKENS:
        return f"a token outside the vocabulary of {vocab_size}"
    return "a prediction that is no probability" if found else ""


def least_row(counts: Ints, curve: Curve) -> float:
    """Seconds of a row where rows take least: of steps with so many tokens, [c], which rise from 0 on."""
    return float(_compiled().least_row(counts, curve.numbers))


def survivals(made: Sequence[Offers], room: Ints, width: int) -> Floats:
    """For each drafter, sample and position the probability to be reached and kept, [d, n, width]; 0: no token.

    `room`, [n], is how many tokens a sample can verify.
    """
    survival = np.zeros((len(made), len(room), width))
    for offers, found in zip(made, survival, strict=True):
        _compiled().survive(_doubles(offers.acceptance), room, found)
    return survival


def longest(survival: Floats, floor: float, survival_floor: float) -> Chosen:
    """Each sample's offer that promises most, of `survivals`.

    An offer that begins below `floor`, and tokens with less survival than `survival_floor`, are none.
    """
    picks, lengths = np.empty((2, survival.shape[1]), np.int64)
    return Chosen(picks, lengths, _compiled().longest(survival, floor, survival_floor, picks, lengths))


def best_picks(survival: Floats, price: float) -> Ints:
    """For each sample the drafter whose tokens bring most above a price a token, in accepted tokens, [n]."""
    picks = np.zeros(survival.shape[1], np.int64)
    if len(survival) > 1:
        _compiled().pick(survival, price, picks)
    return picks


class Line:
    """Tokens of all samples, best first.

    Survival falls along an offer, so what comes first are beginnings of offers.
    """

    def __init__(self, survival: Floats, picks: Ints, least: float) -> None:
        """Of each sample the tokens of one drafter.

        Args:
            survival: of `survivals`.
            picks: the drafter of each sample, [n].
            least: tokens that survive with a lower probability are left out; above 0.
        """
        self.picks = picks
        self._survival = survival
        # Rising.
        self._tokens = np.empty(survival[0].size)
        self._tokens = self._tokens[: _compiled().gather(survival, picks, least, self._tokens)]
        self._tokens.sort()

    def __len__(self) -> int:
        return len(self._tokens)

    def evaluate(self, counts: Ints, curve: Curve) -> tuple[Rated, Rated]:
        """The best of some numbers of tokens, [c], and the best of them above 0, by the time of such steps.

        They rise from 0. Those beyond the line are left out; where none is left, all of the line is one.
        """
        best, other = _compiled().evaluate(self._tokens, counts, curve.numbers)
        return Rated(*best), Rated(*other)

    def cut(self, count: int) -> Ints:
        """Tokens of each sample, [n], among the first so many, above 0, of the line."""
        lengths = np.empty_like(self.picks)
        _compiled().cut(self._survival, self.picks, self._tokens, count, lengths)
        return lengths


def _doubles(values: NDArray[np.floating]) -> Floats:
    """Of one kind, so that no other is compiled while a step waits."""
    return np.ascontiguousarray(values, np.float64)
