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
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log

import numpy as np
from numpy.typing import NDArray

# Weight of a bucket's moved prior, in tokens tried; as many also say half of what a bucket can say of others.
_PRIOR_TOKENS = 12.0
# With more tokens than this in all, half of each bucket's are forgotten: policies and prompts change, and a bucket
# that nobody sees any more must not go on as it was when the others do not.
_MEMORY_TOKENS = 8192.0
# How far off priors are expected to be: variances of the shift, in log-odds, and of the slope.
_SHIFT_VARIANCE = 2.0
_SLOPE_VARIANCE = 1.0
# The fit: most steps of it, the longest, and the length at which it is done. The last one more than halves the
# error's digits, so that what is left does not show.
_MOST_STEPS, _LONGEST_STEP, _DONE = 30, 1.0, 1e-3


class AcceptanceTable:
    """Tokens tried and kept, by bucket."""

    def __init__(self, priors: Sequence[float]) -> None:
        """`priors`: for each bucket, the probability before anything was seen; above 0 and below 1."""
        if not all(0.0 < prior < 1.0 for prior in priors):
            raise ValueError("a prior is a probability above 0 and below 1")
        self._odds = [log(prior / (1.0 - prior)) for prior in priors]
        self._tried = [0.0] * len(self._odds)
        self._kept = [0.0] * len(self._odds)
        self._seen = 0.0
        self._shift, self._slope = 0.0, 1.0
        self._probabilities = np.array(priors, np.float64)
        self._stale = False

    @property
    def probabilities(self) -> NDArray[np.float64]:
        """For each bucket, [buckets], the probability that a token of it is kept, given that all before it were."""
        if self._stale:
            self._fit()
            self._stale = False
        return self._probabilities

    def observe(self, bucket: int, tried: int, kept: int) -> None:
        """Of `tried` tokens of a bucket, `kept` agreed with the response."""
        if self._seen > _MEMORY_TOKENS:
            self.fade(0.5)
        self._tried[bucket] += tried
        self._kept[bucket] += kept
        self._seen += tried
        self._stale = True

    def fade(self, share: float) -> None:
        """Count only a share of what was seen so far: drafts or policy are others from now on."""
        self._tried = [tried * share for tried in self._tried]
        self._kept = [kept * share for kept in self._kept]
        self._seen *= share
        self._stale = True

    def _fit(self) -> None:
        """Move the priors, by Newton's method from where they are, and count each bucket's own tokens."""
        seen = [
            # Tokens tried and kept, as far as they say something of other buckets.
            (odds, tried * weight, kept * weight)
            for odds, tried, kept in zip(self._odds, self._tried, self._kept, strict=True)
            if tried
            for weight in ((_PRIOR_TOKENS + 1.0) / (_PRIOR_TOKENS + tried),)
        ]
        shift, slope = self._shift, self._slope
        for _ in range(_MOST_STEPS):
            up, steeper = -shift / _SHIFT_VARIANCE, (1.0 - slope) / _SLOPE_VARIANCE
            shifts, shared, slopes = 1.0 / _SHIFT_VARIANCE, 0.0, 1.0 / _SLOPE_VARIANCE
            for odds, tried, kept in seen:
                chance = 1.0 / (1.0 + exp(-shift - slope * odds))
                missing = kept - tried * chance
                spread = tried * chance * (1.0 - chance)
                up += missing
                steeper += missing * odds
                shifts += spread
                shared += spread * odds
                slopes += spread * odds * odds
            scale = shifts * slopes - shared * shared
            by_shift = (slopes * up - shared * steeper) / scale
            by_slope = (shifts * steeper - shared * up) / scale
            length = max(abs(by_shift), abs(by_slope))
            # A long step from where the curve is flat overshoots.
            cut = min(1.0, _LONGEST_STEP / length) if length else 1.0
            shift += cut * by_shift
            slope += cut * by_slope
            if length < _DONE:
                break
        self._shift, self._slope = shift, slope
        self._probabilities = np.array(
            [
                (_PRIOR_TOKENS / (1.0 + exp(-shift - slope * odds)) + kept) / (_PRIOR_TOKENS + tried)
                for odds, tried, kept in zip(self._odds, self._tried, self._kept, strict=True)
            ]
        )
