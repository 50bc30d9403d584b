"""Compiled functions that rank and select proposed tokens. Importing this module imports numba.

Survival [..., n, width] is the probability that a token and all before it in its proposal are accepted. It falls
along a proposal, and 0 stands for no token. Tokens are ranked by buckets of survival, in time that grows with
their number and no faster: within a bucket survival differs by less than a percent.

The functions with `trees` in their names select where proposals have branches. The survival of a branch token is
the product of the acceptance along its path, as for the token of a chain. It falls along each path, so the tokens
above any value are a tree.
"""

# mypy: disable-error-code="no-untyped-def"
# Compiled functions have numba types, which annotations cannot express.

from __future__ import annotations

from pathlib import Path

import numpy as np

from kernels import jit

# Buckets to an octave, as a power of 2, and octaves below 1; all smaller values are in the lowest bucket.
_BITS, _OCTAVES = 7, 12
_LOWEST, BUCKETS = (1023 - _OCTAVES) << _BITS, (_OCTAVES << _BITS) + 1

_entry = jit.entry(jit.source_fingerprint(Path(__file__).parent, Path(jit.__file__).parent))


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
def pick(survival, branches, drafter, price, picks):
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
            if d == drafter:
                for j in range(branches.shape[1]):
                    brought += max(branches[i, j] - price, 0.0)
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
    pick(survival, np.empty((len(picks), 0)), -1, price, picks)
    sort_into(survival, picks, buckets)
    return evaluate(buckets, counts, seconds, len(picks))


@_entry
def cut(survival, picks, buckets, count, lengths):
    """Fill how many of the best `count` > 0 tokens each sample has [n]; return the sum of their survival.

    The buckets have at least `count` tokens. From the last bucket the first samples' tokens are taken.
    """
    n, width = survival.shape[1:]
    bits = survival.view(np.int64)
    last, left = len(buckets) - 1, count
    while buckets[last, 0] < left:
        left -= buckets[last, 0]
        last -= 1
    expected = 0.0
    for i in range(n):
        d, length = picks[i], 0
        while length < width and survival[d, i, length] > 0.0:
            bucket = bucket_of(bits[d, i, length])
            if bucket < last or (bucket == last and left == 0):
                break
            left -= bucket == last
            expected += survival[d, i, length]
            length += 1
        lengths[i] = length
    return expected


@_entry
def survive_trees(chains, acceptance, parents, window, room, branches):
    """Fill the survival of branches [n, m] from their acceptance, and cut chains and branches to the room.

    chains [n, width] is the survival of the proposals, which have up to `window` tokens. Each sample keeps its most
    promising tokens, at most its room [n] and the width.
    """
    width = chains.shape[1]
    for i in range(len(branches)):
        count = 0
        for j in range(branches.shape[1]):
            reached, parent = acceptance[i, j], parents[i, j]
            if parent >= window:
                reached *= branches[i, parent - window]
            elif parent >= width:
                reached = 0.0
            elif parent >= 0:
                reached *= chains[i, parent]
            branches[i, j] = reached
            count += reached > 0.0
        if count > 0:
            for j in range(width):
                count += chains[i, j] > 0.0
            for _ in range(count - min(room[i], width)):
                drop_last(chains[i], branches[i])


@jit.kernel
def drop_last(chain, branches):
    """Set the least survival of a sample to 0; of equals the last one, which no token follows."""
    least, place = 2.0, 0
    for j in range(len(chain)):
        if 0.0 < chain[j] <= least:
            least, place = chain[j], j
    for j in range(len(branches)):
        if 0.0 < branches[j] <= least:
            least, place = branches[j], len(chain) + j
    if place < len(chain):
        chain[place] = 0.0
    else:
        branches[place - len(chain)] = 0.0


@_entry
def search_trees(survival, branches, drafter, counts, seconds, price, picks, buckets):
    """Do the same as `search`, with the branches [n, m] of one drafter's proposals."""
    pick(survival, branches, drafter, price, picks)
    sort_into(survival, picks, buckets)
    bits = branches.view(np.int64)
    for i in range(len(branches)):
        if picks[i] == drafter:
            for j in range(branches.shape[1]):
                if branches[i, j] > 0.0:
                    bucket = bucket_of(bits[i, j])
                    buckets[bucket, 0] += 1.0
                    buckets[bucket, 1] += branches[i, j]
    return evaluate(buckets, counts, seconds, len(picks))


@_entry
def cut_trees(survival, branches, drafter, picks, buckets, count, lengths, taken):
    """Do the same as `cut`, and set which branch tokens are `taken` [n, m].

    A sample's chain comes before its branches, and a parent before its children, so the rest of the last bucket is
    never given to a token without its parent.
    """
    n, width = survival.shape[1:]
    last, left = len(buckets) - 1, count
    while buckets[last, 0] < left:
        left -= buckets[last, 0]
        last -= 1
    expected, bits, more = 0.0, survival.view(np.int64), branches.view(np.int64)
    for i in range(n):
        d, length = picks[i], 0
        while length < width and survival[d, i, length] > 0.0:
            bucket = bucket_of(bits[d, i, length])
            if bucket < last or (bucket == last and left == 0):
                break
            left -= bucket == last
            expected += survival[d, i, length]
            length += 1
        lengths[i] = length
        for j in range(branches.shape[1]):
            taken[i, j] = False
            if d == drafter and branches[i, j] > 0.0:
                bucket = bucket_of(more[i, j])
                if bucket > last or (bucket == last and left > 0):
                    left -= bucket == last
                    expected += branches[i, j]
                    taken[i, j] = True
    return expected
