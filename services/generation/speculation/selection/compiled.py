"""Compiled part of `selection`. Importing this module imports numba.

Survival [..., n, width] is the probability that a token and all before it in its proposal are accepted. It
falls along a proposal, and 0 stands for no token.
"""

# mypy: disable-error-code="no-untyped-def"
# Compiled functions have numba types, which annotations cannot express.

from pathlib import Path

import numpy as np

from kernels import jit

_entry = jit.entry(jit.source_fingerprint(Path(__file__).parent, Path(jit.__file__).parent))


@_entry
def flaw(tokens, acceptance, vocab_size):
    """Return 1 if any of tokens [n, w] is outside the vocabulary, 2 if any acceptance [n, w] is no probability."""
    n, w = tokens.shape
    for i in range(n):
        for j in range(w):
            if tokens[i, j] < 0 or tokens[i, j] >= vocab_size:
                return 1
    for i in range(n):
        for j in range(w):
            # Written so that NaN fails as well.
            if not 0.0 <= acceptance[i, j] <= 1.0:
                return 2
    return 0


@_entry
def survive(acceptance, room, survival):
    """Fill survival [n, width], which is 0, from acceptance [n, w], for at most room [n] tokens each."""
    n, width = survival.shape
    width = min(width, acceptance.shape[1])
    for i in range(n):
        reached = 1.0
        for j in range(min(width, room[i])):
            reached *= acceptance[i, j]
            survival[i, j] = reached


@_entry
def longest(survival, floor, survival_floor, picks, lengths):
    """Fill the drafter [n] with the most expected tokens and their number [n]; return the sum of expected tokens.

    survival [drafters, n, width]: a proposal that begins below `floor` and tokens below `survival_floor` do not
    count.
    """
    drafters, n, width = survival.shape
    expected = 0.0
    for i in range(n):
        most = 0.0
        picks[i] = lengths[i] = 0
        for d in range(drafters):
            if survival[d, i, 0] < floor:
                continue
            brought, length = 0.0, 0
            while (
                length < width and survival[d, i, length] > 0.0 and survival[d, i, length] >= survival_floor
            ):
                brought += survival[d, i, length]
                length += 1
            if brought > most:
                most, picks[i], lengths[i] = brought, d, length
        expected += most
    return expected


@_entry
def pick(survival, price, picks):
    """Fill the drafter [n] whose tokens' survival exceeds `price` most, the first of equals."""
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


@_entry
def gather(survival, picks, least, ranked):
    """Copy survival of at least `least` of picked tokens to ranked [n * width]; return their number."""
    n, width = survival.shape[1:]
    tokens = 0
    for i in range(n):
        for j in range(width):
            reached = survival[picks[i], i, j]
            if reached < least:
                break
            ranked[tokens] = reached
            tokens += 1
    return tokens


@_entry
def min_token_seconds(counts, seconds):
    """Return the least seconds that a token adds, over consecutive counts [c], which rise from 0; c > 1."""
    least = np.inf
    for i in range(1, len(counts)):
        least = min(least, (seconds[i] - seconds[i - 1]) / (counts[i] - counts[i - 1]))
    return least


@_entry
def evaluate(ranked, counts, seconds, samples, longest, per_token):
    """Return (tokens, rate, expected, seconds, seconds per last token) of the best count, and of the best above 0.

    0 tokens in the second stand for none. ranked [t] is rising, counts [c] rise from 0, seconds [c] are the times
    of their steps; those above `longest` and `per_token` for each expected token do not count. If the first count
    above 0 is larger than t, t is tried instead.
    """
    t = len(ranked)
    taken, expected, before = 0, 0.0, seconds[0]
    best = (0, samples / seconds[0], 0.0, seconds[0], 0.0)
    other = (0, 0.0, 0.0, 0.0, 0.0)
    for i in range(1, len(counts)):
        count, time = counts[i], seconds[i]
        if i == 1 and count > t:
            time = before + (time - before) * t / count
            count = t
        if count > t or count == taken:
            break
        start = taken
        while taken < count:
            taken += 1
            expected += ranked[t - taken]
        rate = (samples + expected) / time
        if rate > other[1] and time <= longest + per_token * expected:
            other = (taken, rate, expected, time, (time - before) / (count - start))
        before = time
    return (other if other[1] > best[1] else best), other


@_entry
def cut(survival, picks, ranked, count, lengths):
    """Fill how many of the best `count` > 0 ranked tokens each sample has [n]; of equal ones the first samples'."""
    n, width = survival.shape[1:]
    last = ranked[len(ranked) - count]
    left = count
    for i in range(n):
        length = 0
        while length < width and survival[picks[i], i, length] > last:
            length += 1
        lengths[i] = length
        left -= length
    for i in range(n):
        while left > 0 and lengths[i] < width and survival[picks[i], i, lengths[i]] == last:
            lengths[i] += 1
            left -= 1
