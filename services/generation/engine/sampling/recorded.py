"""Log-probabilities that tokens of stored rollouts had when they were generated, to verify drafts by. Pure.

BubbleSpec accepts a draft token x with probability min(1, p_now(x) / p_then(x)) (Eq. 2). A draft is what followed
some context in a rollout, so p_then is found by the token and the few tokens before it. Whoever drafts need not
tell.

This is no speculative sampling of the policy: a token that an index picked out of several rollouts is not a draw
from p_then, and after a rejection the token is drawn from p_now without x, not from max(p_now - p_then, 0), for
which all of p_then would have to be kept. Drafts that no rollout has are verified as certainties (rejection.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

CONTEXT = 4
"""Tokens before a token by which it is found; the prompt's last ones count."""
_NOTHING = -1
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True, eq=False)
class RecordedTokens:
    """Tokens of the rollouts of one prompt: `keys` [K] uint64, rising, and their `logprobs` [K] float32.

    Of equal keys the last counts.
    """

    keys: NDArray[np.uint64]
    logprobs: NDArray[np.float32]

    @classmethod
    def of(cls, prompt: Sequence[int], rollouts: Iterable[tuple[ArrayLike, ArrayLike]]) -> Self:
        """Return the record of rollouts, each as its tokens and as many log-probabilities."""
        keys, logprobs = [np.empty(0, np.uint64)], [np.empty(0, np.float32)]
        for tokens, then in rollouts:
            keys.append(_keys(prompt[-CONTEXT:], tokens))
            logprobs.append(np.asarray(then, np.float32))
        joined = np.concatenate(keys)
        order = np.argsort(joined, kind="stable")
        return cls(joined[order], np.concatenate(logprobs)[order])

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self.keys.nbytes + self.logprobs.nbytes

    def find(self, before: ArrayLike, tokens: ArrayLike) -> NDArray[np.float64]:
        """Return the log-probability of each of the tokens [k] behind `before`, NaN where it is not known."""
        wanted = _keys(before, tokens)
        if not len(self.keys):
            return np.full(len(wanted), np.nan)
        places = np.searchsorted(self.keys, wanted, side="right") - 1
        found = self.logprobs[places].astype(np.float64)
        return np.where(self.keys[places] == wanted, found, np.nan)


@dataclass(frozen=True, slots=True, eq=False)
class RecordedDrafts:
    """Record by which the drafts of a sample are verified, and the lenience of the rule, at least 1."""

    record: RecordedTokens
    lenience: float


class DraftsOfRow(NamedTuple):
    """The same in a step: `before` are the sample's last tokens, at least CONTEXT of them where it has so many."""

    known: RecordedDrafts
    before: NDArray[np.int64]

    def bounds(self, tokens: NDArray[np.int64], u: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return what the policy's probability of each draft token [k] must exceed, by its uniform [k].

        NaN where no rollout has the token.
        """
        bounds: NDArray[np.float64] = u * np.exp(self.known.record.find(self.before, tokens))
        return bounds / self.known.lenience


def _keys(before: ArrayLike, tokens: ArrayLike) -> NDArray[np.uint64]:
    """Return a hash of each token and the CONTEXT tokens before it; `before` are those before the first."""
    padded = np.concatenate((np.full(CONTEXT, _NOTHING), np.asarray(before, np.int64)))[-CONTEXT:]
    # -1 becomes 1, and no token is 0: a shorter context is another one.
    text = np.concatenate((padded, np.asarray(tokens, np.int64))).astype(np.uint64) + np.uint64(2)
    count = len(text) - CONTEXT
    keys = np.zeros(count, np.uint64)
    for place in range(CONTEXT + 1):
        keys = keys * _FACTOR + text[place : place + count]
    return keys
