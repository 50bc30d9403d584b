"""Survival probabilities of proposed tokens, and the selection of tokens to verify by them.

The survival of a token is the probability that it and all tokens before it in its proposal are accepted. A step
waits for the selection, for a handful of samples as for many, and a dozen numpy operations on small arrays take
longer than all of it compiled. numba is imported at first use, which must be after vLLM was imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
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


class SelectedCount(NamedTuple):
    """For each sample [n] the place of its drafter, the best number of draft tokens, and the best above 0.

    `buckets` [b, 2] are the numbers and sums of these drafters' tokens by survival.
    """

    picks: Ints
    best: RatedCount
    drafted: RatedCount
    buckets: Floats


@cache
def _compiled() -> ModuleType:
    from services.generation.speculation.selection import compiled

    return compiled


def warm_up() -> None:
    """Compile or load the compiled functions, so that the first step does not wait for it."""
    for kind in (np.int32, np.int64):
        flaw(Proposals(np.zeros((1, 1), kind), np.ones((1, 1))), 1)
    survival = survivals([Proposals(np.zeros((1, 1), np.int32), np.ones((1, 1)))], np.ones(1, np.int64), 1)
    # A read-only array of the grid, as in real steps.
    found = search(survival, draft_token_counts(1, 1), np.ones(2))
    cut(survival, found, 1)


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


def survivals(made: Sequence[Proposals], room: Ints, width: int) -> Floats:
    """Return the survival by drafter, sample and position [d, n, width]; 0 stands for no token.

    `room` [n] is the number of tokens that each sample can verify.
    """
    survival = np.zeros((len(made), len(room), width))
    for proposals, found in zip(made, survival, strict=True):
        _compiled().survive(_doubles(proposals.acceptance), room, found)
    return survival


def search(survival: Floats, counts: Ints, seconds: Floats, price: float = 0.0) -> SelectedCount:
    """Return the best of `counts` [c] of draft tokens by predicted rate, by `survivals`.

    Counts rise from 0; `seconds` [c] are the times of steps with them. Counts with more tokens than there are do
    not count; if none above 0 is left, the number of all tokens takes their place. Each sample's drafter is the one
    whose tokens' survival exceeds the price of a token most. ValueError unless each count has one time: compiled
    code does not check its bounds.
    """
    if seconds.shape != counts.shape:
        raise ValueError(f"{seconds.size} step times for {counts.size} numbers of draft tokens")
    picks, buckets = np.empty(survival.shape[1], np.int64), np.empty((_compiled().BUCKETS, 2))
    best, drafted = _compiled().search(survival, counts, seconds, price, picks, buckets)
    return SelectedCount(picks, RatedCount(*best), RatedCount(*drafted), buckets)


def cut(survival: Floats, found: SelectedCount, count: int) -> SelectedTokens:
    """Return the `count` > 0 highest-ranked tokens of the picked drafters.

    Survival falls along a proposal, so they are beginnings of proposals.
    """
    lengths = np.empty_like(found.picks)
    expected = _compiled().cut(survival, found.picks, found.buckets, count, lengths)
    return SelectedTokens(found.picks, lengths, expected)


def _doubles(values: NDArray[np.floating]) -> Floats:
    """Return contiguous float64 values, so that no other signature is compiled while a step waits."""
    return np.ascontiguousarray(values, np.float64)
