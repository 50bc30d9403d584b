"""Acceptance probability of proposed tokens, learned online by bucket. Pure.

A drafter sorts its tokens into buckets by their properties (length of the match, share of the occurrences, tokens
since the last mismatch) and counts for each bucket the tokens tried, and the tokens that agreed with the sampled
ones. Each bucket has a prior.

Priors are wrong in the same direction: drafts of an older policy are worse in every bucket, and where mismatches
are random,
a long match means no more than a short one. So all buckets together correct the priors by logistic regression:
the log-odds of each become shift + slope * its own (RLHFSpec's fitted function of the draft's confidence,
section 5.2, with a Gaussian prior on both numbers), fitted by penalised maximum likelihood. Tokens of a bucket
are correlated, so its count is taken as beta-binomial: many tokens say little more about the other buckets than
some. The bucket's own count then updates the corrected prior, and outweighs it when it is large.

The fit is compiled because drafters query it in every step. numba is imported at first use, which must be after
vLLM was imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.late_module import LateModule

_compiled: Any = LateModule("services.generation.speculation.compiled")

Ints = NDArray[np.int64]
# Above this many tokens in total all counts are halved: policies and prompts change, and a bucket that is no
# longer used must not keep an old estimate against the others.
_MEMORY_TOKENS = 8192.0


class AcceptanceTable:
    """Tokens tried and kept by bucket, and the acceptance estimated from them."""

    def __init__(self, priors: Sequence[float]) -> None:
        """Begin with the prior probability of each bucket, in (0, 1); ValueError for others."""
        if not all(0.0 < prior < 1.0 for prior in priors):
            raise ValueError("a prior is a probability above 0 and below 1")
        prior = np.array(priors, np.float64)
        self._odds = np.log(prior / (1.0 - prior))
        self._tried, self._kept = np.zeros((2, len(prior)))
        self._total = 0.0
        # Shift and slope of the priors.
        self._fitted = np.array([0.0, 1.0])
        self._probabilities = prior
        self._stale = False

    @property
    def probabilities(self) -> NDArray[np.float64]:
        """For each bucket [buckets], the probability that a token is accepted if all before it are."""
        if self._stale:
            # A new array: earlier callers keep theirs.
            self._probabilities = np.empty_like(self._odds)
            _compiled.fit(self._odds, self._tried, self._kept, self._fitted, self._probabilities)
            self._stale = False
        return self._probabilities

    def observe(self, bucket: int | slice, tried: int | Ints, kept: int | Ints) -> None:
        """Count that `kept` of `tried` tokens of a bucket, or of each of some, agreed with the response."""
        if self._total > _MEMORY_TOKENS:
            self.fade(0.5)
        self._tried[bucket] += tried
        self._kept[bucket] += kept
        self._total += tried if isinstance(tried, int) else int(tried.sum())
        self._stale = True

    def fade(self, share: float) -> None:
        """Keep only a share of all counts, because drafts or policy changed."""
        self._tried *= share
        self._kept *= share
        self._total *= share
        self._stale = True


def warm_up() -> None:
    """Compile or load the compiled functions, so that the first step does not wait for them."""
    table = AcceptanceTable((0.5,))
    table.observe(0, 1, 1)
    len(table.probabilities)
