"""The compiled part of `selection`. Importing this module imports numba.

Survival, [..., n, width], is the probability that a token is reached and kept: it falls along an offer, and 0
stands for no token.
"""

# mypy: disable-error-code="no-untyped-def"
# Compiled functions carry numba types, which annotations cannot say.

from pathlib import Path

import numpy as np

from kernels.coupled_sampler import jit
from services.policy.curve import compiled as curves
from services.policy.curve.compiled import REQUESTS, seconds_of

_entry = jit.entry(
    jit.source_fingerprint(*(Path(each).parent for each in (__file__, curves.__file__, jit.__file__)))
)


@_entry
def flaw(tokens, acceptance, vocab_size):
    """1 if any of tokens [n, w] is outside the vocabulary, 2 if any of acceptance [n, w] is no probability."""
    n, w = tokens.shape
    for i in range(n):
        for j in range(w):
            if tokens[i, j] < 0 or tokens[i, j] >= vocab_size:
                return 1
    for i in range(n):
        for j in range(w):
            # Asked so that a NaN fails, too.
            if not 0.0 <= acceptance[i, j] <= 1.0:
                return 2
    return 0


@_entry
def survive(acceptance, room, survival):
    """Fill survival [n, width], which is 0, from acceptance [n, w] with at most room [n] tokens each."""
    n, width = survival.shape
    width = min(width, acceptance.shape[1])
    for i in range(n):
        reached = 1.0
        for j in range(min(width, room[i])):
            reached *= acceptance[i, j]
            survival[i, j] = reached


@_entry
def longest(survival, floor, survival_floor, picks, lengths):
    """For each sample the drafter [n] whose tokens bring most, and their number [n]; what is expected of all.

    survival [drafters, n, width]: an offer that begins below `floor`, and tokens below `survival_floor`, are none.
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
    """For each sample the drafter [n] whose tokens bring most above `price`, the first of equals."""
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
def gather(survival, picks, least, line):
    """The survival of the picked tokens where it is `least` or more, to line [n * width]; how many those are."""
    n, width = survival.shape[1:]
    tokens = 0
    for i in range(n):
        for j in range(width):
            reached = survival[picks[i], i, j]
            if reached < least:
                break
            line[tokens] = reached
            tokens += 1
    return tokens


@_entry
def least_row(counts, curve):
    """Seconds of a row where rows take least: counts [c] rise from 0, c > 1."""
    before = seconds_of(curve, counts[0])
    least = np.inf
    for i in range(1, len(counts)):
        seconds = seconds_of(curve, counts[i])
        least = min(least, (seconds - before) / (counts[i] - counts[i - 1]))
        before = seconds
    return least


@_entry
def evaluate(line, counts, curve):
    """(tokens, rate, expected, seconds, seconds of the last rows) of the best number of tokens.

    And of the best above 0; 0 tokens there stand for none. line [t] is rising, counts [c] from 0 on. Where the
    first above 0 is beyond the line, t is tried instead.
    """
    t = len(line)
    plain = seconds_of(curve, 0)
    taken, expected, before = 0, 0.0, plain
    requests = curve[REQUESTS]
    best = (0, requests / plain, 0.0, plain, 0.0)
    other = (0, 0.0, 0.0, 0.0, 0.0)
    for i in range(1, len(counts)):
        count = t if i == 1 and counts[1] > t else counts[i]
        if count > t or count == taken:
            break
        start = taken
        while taken < count:
            taken += 1
            expected += line[t - taken]
        seconds = seconds_of(curve, count)
        rate = (requests + expected) / seconds
        if rate > other[1]:
            other = (taken, rate, expected, seconds, (seconds - before) / (count - start))
        before = seconds
    return (other if other[1] > best[1] else best), other


@_entry
def cut(survival, picks, line, count, lengths):
    """Tokens of each sample, [n], among the best `count` > 0 of line; of equal ones the first samples' come."""
    n, width = survival.shape[1:]
    last = line[len(line) - count]
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
