"""Compiled functions that rank and select proposed tokens, and fit their acceptance. Importing them imports numba.

Survival [..., n, width] is the probability that a token and all before it in its proposal are accepted. It falls
along a proposal, and 0 stands for no token. Tokens are ranked by buckets of survival, in time that grows with
their number and no faster: within a bucket survival differs by less than a percent.
"""

# mypy: disable-error-code="no-untyped-def"
# Compiled functions have numba types, which annotations cannot express.

from __future__ import annotations

from math import exp
from pathlib import Path

import numpy as np

from kernels import jit

# Buckets to an octave, as a power of 2, and octaves below 1; all smaller values are in the lowest bucket.
_BITS, _OCTAVES = 7, 12
_LOWEST, BUCKETS = (1023 - _OCTAVES) << _BITS, (_OCTAVES << _BITS) + 1

# Weight of a bucket's fitted prior, in verified tokens; a bucket with this number of tokens has half of its
# greatest weight in the fit of the others.
_PRIOR_TOKENS = 12.0
# Prior variances of the shift (in log-odds) and of the slope.
_SHIFT_VARIANCE = 2.0
_SLOPE_VARIANCE = 1.0
# Newton's method: most steps, the longest step, and the step length at which it has converged. The last step
# more than doubles the number of correct digits.
_MOST_STEPS, _LONGEST_STEP, _DONE = 30, 1.0, 1e-3

_entry = jit.entry(jit.source_fingerprint(Path(__file__), Path(jit.__file__).parent))


@_entry
def survive(acceptance, room, survival):
    """Fill survival [n, width], which is 0, from acceptance [n, w], for at most room [n] tokens each."""
    width = min(survival.shape[1], acceptance.shape[1])
    for i in range(len(survival)):
        reached = 1.0
        for j in range(min(width, room[i])):
            reached *= acceptance[i, j]
            survival[i, j] = reached


@_entry
def within(values, most):
    """Return True if all values [n, w] are from 0 to `most`; NaN is not."""
    for i in range(values.shape[0]):
        for j in range(values.shape[1]):
            if not 0 <= values[i, j] <= most:
                return False
    return True


@jit.kernel
def pick(survival, price, picks):
    """Fill the drafter [n] whose tokens exceed `price` most, the first of equals."""
    drafters, n, width = survival.shape
    for i in range(n):
        best, most = 0, -1.0
        for d in range(drafters):
            brought = 0.0
            for j in range(width):
                if survival[d, i, j] <= price:
                    break
                brought += survival[d, i, j] - price
            if brought > most:
                best, most = d, brought
        picks[i] = best


@jit.kernel
def bucket_of(bits):
    """Return the bucket of a survival by its bits: the exponent and the first bits of the fraction."""
    # Clipped, because compiled code does not check bounds, and a value that is no probability may exceed them.
    return min(max((bits >> (52 - _BITS)) - _LOWEST, 0), BUCKETS - 1)


@jit.kernel
def sort_into(survival, picks, buckets):
    """Fill the number of picked tokens in each of the buckets [b, 2] and the sum of their survival."""
    buckets[:] = 0.0
    bits = survival.view(np.int64)
    for i in range(survival.shape[1]):
        d = picks[i]
        for j in range(survival.shape[2]):
            reached = survival[d, i, j]
            if reached <= 0.0:
                break
            bucket = bucket_of(bits[d, i, j])
            buckets[bucket, 0] += 1.0
            buckets[bucket, 1] += reached


@jit.kernel
def evaluate(buckets, counts, seconds, samples):
    """Return (tokens, rate, expected, seconds, seconds per last token) of the best count above 0."""
    bucket, left, mean = len(buckets), 0.0, 0.0
    taken, expected, before = 0.0, 0.0, seconds[0]
    best = (0, 0.0, 0.0, 0.0, 0.0)
    for i in range(1, len(counts)):
        start = taken
        while taken < counts[i] and (left > 0.0 or bucket > 0):
            if left == 0.0:
                bucket -= 1
                left, mean = buckets[bucket, 0], buckets[bucket, 1] / max(buckets[bucket, 0], 1.0)
            some = min(counts[i] - taken, left)
            taken += some
            left -= some
            expected += mean * some
        time = seconds[i]
        if taken < counts[i]:
            # No tokens are left.
            if i > 1 or taken == 0.0:
                break
            time = before + (time - before) * taken / counts[i]
        rate = (samples + expected) / time
        if rate > best[1]:
            best = (int(taken), rate, expected, time, (time - before) / (taken - start))
        before = time
    return best


@_entry
def search(survival, counts, seconds, price, picks, buckets):
    """Fill picks [n] at a price of a token, and buckets [b, 2]; return the result of `evaluate`.

    It has 0 tokens if none is worth it. counts [c] rise from 0, seconds [c] are the times of their steps. If the
    first count above 0 is larger than the number of tokens, that number is tried instead.
    """
    pick(survival, price, picks)
    sort_into(survival, picks, buckets)
    return evaluate(buckets, counts, seconds, len(picks))


@jit.kernel
def last_bucket(buckets, count):
    """Return the lowest bucket of the best `count` tokens, and how many of these are in it."""
    last, left = len(buckets) - 1, float(count)
    while buckets[last, 0] < left:
        left -= buckets[last, 0]
        last -= 1
    return last, left


@jit.kernel
def cut_chain(survival, bits, d, i, last, left, expected):
    """Return how many tokens of chain (d, i) are above the bucket `last`, or among the `left` ones in it.

    Also returns what is left of that bucket, and `expected` with the survival of these tokens. `bits` is `survival`
    as integers; views of one chain would cost more than its tokens.
    """
    length, width = 0, survival.shape[2]
    while length < width and survival[d, i, length] > 0.0:
        bucket = bucket_of(bits[d, i, length])
        if bucket < last or (bucket == last and left == 0):
            break
        left -= bucket == last
        expected += survival[d, i, length]
        length += 1
    return length, left, expected


@_entry
def cut(survival, picks, buckets, count, lengths):
    """Fill how many of the best `count` > 0 tokens each sample has [n]; return the sum of their survival.

    The buckets have at least `count` tokens. From the last bucket the first samples' tokens are taken.
    """
    last, left = last_bucket(buckets, count)
    expected, bits = 0.0, survival.view(np.int64)
    for i in range(len(picks)):
        lengths[i], left, expected = cut_chain(survival, bits, picks[i], i, last, left, expected)
    return expected


@_entry
def fit(odds, tried, kept, fitted, probabilities):
    """Fit shift and slope by Newton's method, starting from `fitted`, and fill the buckets' probabilities.

    odds (prior log-odds), tried, kept and probabilities are [buckets]; fitted [2] holds shift and slope.
    """
    shift, slope = fitted[0], fitted[1]
    for _ in range(_MOST_STEPS):
        up, steeper = -shift / _SHIFT_VARIANCE, (1.0 - slope) / _SLOPE_VARIANCE
        shifts, shared, slopes = 1.0 / _SHIFT_VARIANCE, 0.0, 1.0 / _SLOPE_VARIANCE
        for i in range(len(odds)):
            # Weight with which a bucket's tokens inform the others.
            weight = (_PRIOR_TOKENS + 1.0) / (_PRIOR_TOKENS + tried[i])
            chance = 1.0 / (1.0 + exp(-shift - slope * odds[i]))
            missing = weight * (kept[i] - tried[i] * chance)
            spread = weight * tried[i] * chance * (1.0 - chance)
            up += missing
            steeper += missing * odds[i]
            shifts += spread
            shared += spread * odds[i]
            slopes += spread * odds[i] * odds[i]
        scale = shifts * slopes - shared * shared
        by_shift = (slopes * up - shared * steeper) / scale
        by_slope = (shifts * steeper - shared * up) / scale
        length = max(abs(by_shift), abs(by_slope))
        # Shortened, because a full step from a flat region overshoots.
        cut = min(1.0, _LONGEST_STEP / length) if length > 0.0 else 1.0
        shift += cut * by_shift
        slope += cut * by_slope
        if length < _DONE:
            break
    fitted[0], fitted[1] = shift, slope
    for i in range(len(odds)):
        prior = _PRIOR_TOKENS / (1.0 + exp(-shift - slope * odds[i]))
        probabilities[i] = (prior + kept[i]) / (_PRIOR_TOKENS + tried[i])
