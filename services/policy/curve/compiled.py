"""The compiled part of `curve`. Importing this module imports numba.

A curve is an array of numbers: what does not depend on draft tokens, the correction, and straight pieces that make
a time of what all that adds up to.
"""

# mypy: disable-error-code="no-untyped-def"
# Compiled functions carry numba types, which annotations cannot say.

from math import log2, sqrt
from pathlib import Path

from kernels.coupled_sampler import jit

# In seconds, but for the samples: to move the weights; to compute a row in dense layers; to move the KV; to compute
# a row in attention; any step, each draft token, the root of the draft tokens, and any draft token at all, beyond
# the rooflines.
REQUESTS, WEIGHTS, DENSE_ROW, KV, ATTENTION_ROW, REST, TOKEN, ATTENDING, VERIFYING = range(9)
FACTOR, OFFSET, LIMIT = range(9, 12)
# How many pieces, and where they begin: start, value there and slope of each, rising.
COUNT, PIECES = 12, 13
# Predictions that differ by no more than this share are the same.
SAME = 1e-9

_entry = jit.entry(jit.source_fingerprint(Path(__file__).parent, Path(jit.__file__).parent))


@jit.kernel
def rough_of(curve, drafted):
    """Without residual and correction."""
    rows = curve[REQUESTS] + drafted
    dense, attention = (
        max(rows * curve[DENSE_ROW], curve[WEIGHTS]),
        max(rows * curve[ATTENTION_ROW], curve[KV]),
    )
    seconds = dense + attention + curve[REST]
    if drafted > 0:
        seconds += drafted * curve[TOKEN] + sqrt(drafted) * curve[ATTENDING] + curve[VERIFYING]
    return seconds


@jit.kernel
def raw_of(curve, drafted):
    """Without correction."""
    rough = rough_of(curve, drafted)
    piece = PIECES
    for k in range(1, int(curve[COUNT])):
        if curve[PIECES + 3 * k] > rough:
            break
        piece = PIECES + 3 * k
    return curve[piece + 1] + curve[piece + 2] * (rough - curve[piece])


@jit.kernel
def seconds_of(curve, drafted):
    """The time of a step with so many draft tokens."""
    raw = raw_of(curve, drafted)
    return min(max(curve[FACTOR] * raw + curve[OFFSET], raw / curve[LIMIT]), raw * curve[LIMIT])


@jit.kernel
def place_of(axis, value):
    """The last of an axis that is not above a value, and how far it is from there to the next."""
    last = len(axis) - 1
    if value <= axis[0]:
        return 0, 0.0
    if value >= axis[last]:
        return last, 0.0
    i = 0
    while axis[i + 1] <= value:
        i += 1
    return i, (value - axis[i]) / (axis[i + 1] - axis[i])


@jit.kernel
def put(curve, k, start, value, slope):
    """The piece of this number."""
    piece = PIECES + 3 * k
    curve[piece], curve[piece + 1], curve[piece + 2] = start, value, slope


@_entry
def trace(terms, requests, lengths, drafts, shares, n, context, curve):
    """Fill a curve, uncorrected, and say what a plain step takes by it.

    terms: see `curve.Curves`. shares [requests, lengths, drafts]: of a residual, whose first two axes are
    logarithms (base 2); of none it is empty. At each of `drafts` [d] a sample, from 0 on, a time is longer by its
    share, but not shorter than the one before; of predictions that are the same the first counts.
    """
    curve[REQUESTS], curve[WEIGHTS], curve[DENSE_ROW] = n, terms[0], terms[1]
    curve[KV], curve[ATTENTION_ROW] = terms[2] * context, terms[3] * context / n
    curve[REST], curve[TOKEN] = terms[4] + terms[5] * n, terms[6]
    curve[ATTENDING], curve[VERIFYING] = terms[7] * context / sqrt(n), terms[8] * n
    curve[FACTOR], curve[OFFSET], curve[LIMIT] = 1.0, 0.0, terms[9]
    count = 0
    if shares.size == 0:
        put(curve, count, 0.0, 0.0, 1.0)
    else:
        i, across = place_of(requests, log2(n))
        j, along = place_of(lengths, log2(context / n) if context > 0 else lengths[0])
        next_i, next_j = min(i + 1, len(requests) - 1), min(j + 1, len(lengths) - 1)
        start = time = 0.0
        for k in range(len(drafts)):
            low = (1.0 - along) * shares[i, j, k] + along * shares[i, next_j, k]
            high = (1.0 - along) * shares[next_i, j, k] + along * shares[next_i, next_j, k]
            predicted = rough_of(curve, n * drafts[k])
            measured = predicted * (1.0 + (1.0 - across) * low + across * high)
            if k == 0:
                start, time = predicted, measured
            elif predicted - start > SAME * predicted:
                later = max(time, measured)
                put(curve, count, start, time, (later - time) / (predicted - start))
                count += 1
                start, time = predicted, later
        # The last one goes on.
        put(curve, count, start, time, time / start)
    curve[COUNT] = count + 1
    return raw_of(curve, 0.0)


@_entry
def raw_seconds(curve, drafted):
    """See `raw_of`."""
    return raw_of(curve, drafted)


@_entry
def seconds(curve, drafted):
    """See `seconds_of`."""
    return seconds_of(curve, drafted)
