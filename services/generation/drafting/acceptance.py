"""How likely an offered token is kept, learned while decoding. Pure.

A drafter sorts its tokens into buckets by what it knows of them (length of the match, share of the occurrences,
tokens since the last mismatch) and counts for each bucket how many were tried and how many agreed with what the
policy sampled. A few tokens' worth of a prior stands in until there is something to count.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

# Weight of the prior, in tokens tried.
_PRIOR_TOKENS = 8.0
# A bucket with more tokens than this forgets half of them: policies and prompts change.
_MEMORY_TOKENS = 4096.0


class AcceptanceTable:
    """Tokens tried and kept, by bucket."""

    def __init__(self, priors: Sequence[float]) -> None:
        """`priors`: for each bucket, the probability before anything was seen."""
        self._priors = tuple(priors)
        self._tried = [0.0] * len(self._priors)
        self._kept = [0.0] * len(self._priors)
        self._probabilities = np.array(self._priors, np.float64)

    @property
    def probabilities(self) -> NDArray[np.float64]:
        """For each bucket, [buckets], the probability that a token of it is kept, given that all before it were."""
        return self._probabilities

    def observe(self, bucket: int, tried: int, kept: int) -> None:
        """Of `tried` tokens of a bucket, `kept` agreed with the response."""
        if self._tried[bucket] > _MEMORY_TOKENS:
            self._tried[bucket] /= 2
            self._kept[bucket] /= 2
        self._tried[bucket] += tried
        self._kept[bucket] += kept
        prior = self._priors[bucket] * _PRIOR_TOKENS
        self._probabilities[bucket] = (prior + self._kept[bucket]) / (_PRIOR_TOKENS + self._tried[bucket])
