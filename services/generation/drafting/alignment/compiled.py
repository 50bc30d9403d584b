"""The compiled part of `alignments`: compares responses with the sequences that they follow, and offers from these.

Importing this module imports numba.
"""

# mypy: disable-error-code="no-untyped-def"
# Compiled functions carry numba types, which annotations cannot say.

from pathlib import Path

import numpy as np

from kernels.coupled_sampler import jit
from services.generation.drafting.alignment.row import (
    ANCHOR,
    BEGIN,
    LATEST,
    LENGTH,
    MATCHED,
    OFFSET,
    REACH,
    SEEN,
    SOURCE,
    UNBROKEN,
)

_entry = jit.entry(jit.source_fingerprint(Path(__file__).parent, Path(jit.__file__).parent))


@jit.kernel
def bucket_of(matched, ramp, last):
    """The bucket of a token after so many matches in a row; `ramp` ends with the widest but the last."""
    return last if matched >= UNBROKEN else ramp[min(matched, np.int64(len(ramp) - 1))]


@jit.kernel
def ends_there(given, begin, end, anchor):
    """Whether given[begin:][:end] ends with `anchor`."""
    same = True
    for i in range(ANCHOR):
        same &= given[begin + end - ANCHOR + i] == anchor[i]
    return same


@jit.kernel
def nearest(given, begin, length, here, anchor):
    """The length of the sequence's beginning that ends with `anchor` and is nearest to `here`, but not that itself.

    Of two the longer; -1 when there is none within reach.
    """
    for distance in range(1, REACH):
        for end in (here + distance, here - distance):
            if ANCHOR <= end <= length and ends_there(given, begin, end, anchor):
                return end
    return np.int64(-1)


@jit.kernel
def agreeing(given, begin, length, end, latest):
    """How many of the latest tokens lie at the end of the sequence's beginning of length `end`."""
    count = 0
    for i in range(1, min(len(latest), end) + 1):
        count += end - i < length and given[begin + end - i] == latest[-i]
    return count


@_entry
def compare(rows, lengths, tokens, cu, given, alignments, ramp, tried, kept):
    """Compare what is new in responses, and realign those whose latest token mismatched.

    rows [n] int64: of `alignments`. lengths [n] int64: of the responses. tokens [cu[n]] int32: the ends of them,
    one after the other, of each at least what is new and the last LATEST. tried, kept [sources, buckets] int64:
    added to.
    """
    last = tried.shape[1] - 1
    for i in range(len(rows)):
        row = alignments[rows[i]]
        begin, length, source = row[BEGIN], row[LENGTH], row[SOURCE]
        offset, matched = row[OFFSET], row[MATCHED]
        end = lengths[i]
        if row[SEEN] == end:
            continue
        # Where the response's first token would lie in `tokens`.
        origin = cu[i + 1] - end
        for position in range(row[SEEN], min(end, length - offset)):
            place = position + offset
            # Outside of the sequence there is nothing that could have matched: that says nothing of it.
            if place >= 0:
                same = given[begin + place] == tokens[origin + position]
                bucket = bucket_of(matched, ramp, last)
                tried[source, bucket] += 1
                kept[source, bucket] += same
                matched = matched + 1 if same else np.int64(0)
        if end + offset > length:
            matched = np.int64(0)
        if matched == 0 and end >= ANCHOR:
            latest, here = tokens[cu[i + 1] - min(end, LATEST) : cu[i + 1]], end + offset
            # Outside of the sequence there is nothing to offer.
            most = agreeing(given, begin, length, here, latest) if here < length else -1
            if offset != 0 and end < length:
                aligned = agreeing(given, begin, length, end, latest)
                if aligned > most:
                    offset, most = np.int64(0), aligned
            place = nearest(given, begin, length, here, latest[-ANCHOR:])
            if place >= 0 and agreeing(given, begin, length, place, latest) >= most:
                offset, matched = place - end, np.int64(ANCHOR)
        row[SEEN], row[OFFSET], row[MATCHED] = end, offset, matched


@_entry
def offer(rows, places, given, alignments, ramp, probabilities, offered, acceptance):
    """Fill offered and acceptance [all, window] at places [n]; the number of samples with an offer.

    probabilities [sources, buckets] float64.
    """
    made = 0
    last, window = probabilities.shape[1] - 1, offered.shape[1]
    for i in range(len(rows)):
        row = alignments[rows[i]]
        here, source, matched = row[SEEN] + row[OFFSET], row[SOURCE], row[MATCHED]
        count = min(window, row[LENGTH] - here)
        if here < 0 or count <= 0:
            continue
        made += 1
        for j in range(count):
            offered[places[i], j] = given[row[BEGIN] + here + j]
            acceptance[places[i], j] = probabilities[source, bucket_of(matched + j, ramp, last)]
    return made
