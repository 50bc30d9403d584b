"""Survival probabilities of proposed tokens, and the selection of tokens to verify by them.

The survival of a token is the probability that it and all tokens before it in its proposal are accepted. A step
waits for the selection, for a handful of samples as for many, and a dozen numpy operations on small arrays take
longer than all of it compiled. numba is imported at first use, which must be after vLLM was imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import inf
from types import ModuleType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from services.generation.speculation.batch_sizes import draft_token_counts
from services.generation.speculation.drafter import Proposals

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
# Results of the compiled `flaw`.
_TOKENS, _ACCEPTANCE = 1, 2


class SelectedTokens(NamedTuple):
    """For each sample [n] the place of its drafter and its number of tokens, and the expected accepted tokens."""

    picks: Ints
    lengths: Ints
    expected: float


class RatedCount(NamedTuple):
    """Number of draft tokens of a step (0: plain decoding) and its predictions.

    `rate` is in tokens per second, `expected` counts accepted tokens, `seconds` is the time of the step and
    `token_seconds` the time that each of the last tokens adds to it.
    """

    tokens: int
    rate: float
    expected: float
    seconds: float
    token_seconds: float


@cache
def _compiled() -> ModuleType:
    from services.generation.speculation.selection import compiled

    return compiled


def warm_up() -> None:
    """Compile or load the compiled functions, so that the first step does not wait for it."""
    for kind in (np.int32, np.int64):
        flaw(Proposals(np.zeros((1, 1), kind), np.ones((1, 1))), 1)
    survival = survivals([Proposals(np.zeros((1, 1), np.int32), np.ones((1, 1)))], np.ones(1, np.int64), 1)
    longest(survival, 0.0, 0.0)
    ranked = RankedTokens(survival, best_picks(survival, 0.0), 0.5)
    # A read-only array of the grid, as in real steps.
    counts, seconds = draft_token_counts(1, 1), np.ones(2)
    min_token_seconds(counts, seconds)
    ranked.evaluate(counts, seconds)
    ranked.cut(1)


def flaw(proposals: Proposals, vocab_size: int) -> str:
    """Return what is wrong with the values of proposals, whose shapes are right, or ""."""
    tokens, acceptance = proposals.tokens, proposals.acceptance
    found = _TOKENS if tokens.dtype.kind not in "iu" else _ACCEPTANCE if acceptance.dtype.kind != "f" else 0
    if not found:
        if tokens.dtype.char != "i":
            # Values that overflow become negative, and are refused as well.
            tokens = tokens.astype(np.int64)
        found = _compiled().flaw(np.ascontiguousarray(tokens), _doubles(acceptance), vocab_size)
    if found == _TOKENS:
        return f"a token outside the vocabulary of {vocab_size}"
    return "a prediction that is no probability" if found else ""


def min_token_seconds(counts: Ints, seconds: Floats) -> float:
    """Return the least that a draft token adds to the `seconds` [c] of steps with `counts` [c], rising from 0."""
    return float(_compiled().min_token_seconds(counts, seconds))


def survivals(made: Sequence[Proposals], room: Ints, width: int) -> Floats:
    """Return the survival by drafter, sample and position [d, n, width]; 0 stands for no token.

    `room` [n] is the number of tokens that each sample can verify.
    """
    survival = np.zeros((len(made), len(room), width))
    for proposals, found in zip(made, survival, strict=True):
        _compiled().survive(_doubles(proposals.acceptance), room, found)
    return survival


def longest(survival: Floats, floor: float, survival_floor: float) -> SelectedTokens:
    """Return for each sample the proposal with the most expected accepted tokens, by `survivals`.

    Proposals whose first token survives with less than `floor` are ignored, and so are tokens below
    `survival_floor`.
    """
    picks, lengths = np.empty((2, survival.shape[1]), np.int64)
    expected = _compiled().longest(survival, floor, survival_floor, picks, lengths)
    return SelectedTokens(picks, lengths, expected)


def best_picks(survival: Floats, price: float) -> Ints:
    """Return for each sample [n] the drafter whose tokens exceed `price` in survival most, in total."""
    picks = np.zeros(survival.shape[1], np.int64)
    if len(survival) > 1:
        _compiled().pick(survival, price, picks)
    return picks


class RankedTokens:
    """Tokens of all samples, ranked by survival.

    Survival falls along a proposal, so the highest-ranked tokens are always beginnings of proposals.
    """

    def __init__(self, survival: Floats, picks: Ints, least: float) -> None:
        """Rank the tokens of one drafter per sample.

        Args:
            survival: by `survivals`.
            picks: the drafter of each sample [n].
            least: survival below which tokens are left out; above 0.
        """
        self.picks = picks
        self._survival = survival
        # Rising.
        self._tokens = np.empty(survival[0].size)
        self._tokens = self._tokens[: _compiled().gather(survival, picks, least, self._tokens)]
        self._tokens.sort()

    def __len__(self) -> int:
        return len(self._tokens)

    def evaluate(
        self, counts: Ints, seconds: Floats, longest: float = inf, per_token: float = 0.0
    ) -> tuple[RatedCount, RatedCount]:
        """Return the best of `counts` [c] by predicted rate, and the best of those above 0.

        Counts rise from 0; `seconds` [c] are the times of steps with them, at most `longest` and `per_token`
        for each expected token. Counts with more tokens than there are do not count; if none above 0 is left, the
        number of all tokens takes their place.
        """
        samples = float(len(self.picks))
        best, drafted = _compiled().evaluate(self._tokens, counts, seconds, samples, longest, per_token)
        return RatedCount(*best), RatedCount(*drafted)

    def cut(self, count: int) -> Ints:
        """Return how many of the `count` > 0 highest-ranked tokens each sample has, [n]."""
        lengths = np.empty_like(self.picks)
        _compiled().cut(self._survival, self.picks, self._tokens, count, lengths)
        return lengths


def _doubles(values: NDArray[np.floating]) -> Floats:
    """Return contiguous float64 values, so that no other signature is compiled while a step waits."""
    return np.ascontiguousarray(values, np.float64)
