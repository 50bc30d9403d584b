"""How likely an offered token is kept, learned while decoding. Pure.

A drafter sorts its tokens into buckets by what it knows of them (length of the match, share of the occurrences,
tokens since the last mismatch) and counts for each bucket how many were tried and how many agreed with what the
policy sampled. Until there is something to count a prior stands in.

Priors are wrong together: drafts of a policy that has moved on are worse in every bucket, and where mismatches come
at random a long match says no more than a short one. So all buckets together move the priors: the log-odds of each
become shift + slope * its own (RLHFSpec's fitted function of what a drafter says, section 5.2, with a prior of its
own on both numbers), fitted by penalised likelihood. A bucket's tokens are alike: its count is that of a
beta-binomial, of which many tokens say little more of the other buckets than some. Beside that each bucket has its
own count, and with many tokens nothing else matters to it.

The fit is compiled: drafters ask in every step. numba is imported then, which must be after vLLM was.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

# With more tokens than this in all, half of each bucket's are forgotten: policies and prompts change, and a bucket
# that nobody sees any more must not go on as it was when the others do not.
_MEMORY_TOKENS = 8192.0


@cache
def _compiled() -> ModuleType:
    from services.generation.drafting.acceptance import compiled

    return compiled


class AcceptanceTable:
    """Tokens tried and kept, by bucket."""

    def __init__(self, priors: Sequence[float]) -> None:
        """`priors`: for each bucket, the probability before anything was seen; above 0 and below 1."""
        if not all(0.0 < prior < 1.0 for prior in priors):
            raise ValueError("a prior is a probability above 0 and below 1")
        given = np.array(priors, np.float64)
        self._odds = np.log(given / (1.0 - given))
        self._tried, self._kept = np.zeros((2, len(given)))
        self._seen = 0.0
        # Shift and slope.
        self._moved = np.array([0.0, 1.0])
        self._probabilities = given
        self._stale = False

    @property
    def probabilities(self) -> NDArray[np.float64]:
        """For each bucket, [buckets], the probability that a token of it is kept, given that all before it were."""
        if self._stale:
            # Who has asked before keeps what there was then.
            self._probabilities = np.empty_like(self._odds)
            _compiled().fit(self._odds, self._tried, self._kept, self._moved, self._probabilities)
            self._stale = False
        return self._probabilities

    def observe(self, bucket: int, tried: int, kept: int) -> None:
        """Of `tried` tokens of a bucket, `kept` agreed with the response."""
        self._room()
        self._tried[bucket] += tried
        self._kept[bucket] += kept
        self._seen += tried
        self._stale = True

    def observe_all(self, tried: NDArray[np.int64], kept: NDArray[np.int64]) -> None:
        """As `observe`, of all buckets, [buckets] each."""
        total = int(tried.sum())
        if not total:
            return
        self._room()
        self._tried += tried
        self._kept += kept
        self._seen += total
        self._stale = True

    def _room(self) -> None:
        if self._seen > _MEMORY_TOKENS:
            self.fade(0.5)

    def fade(self, share: float) -> None:
        """Count only a share of what was seen so far: drafts or policy are others from now on."""
        self._tried *= share
        self._kept *= share
        self._seen *= share
        self._stale = True


def warm_up() -> None:
    """Compile, or load what was compiled, so that the first step does not pay for it."""
    table = AcceptanceTable((0.5,))
    table.observe(0, 1, 1)
    len(table.probabilities)
