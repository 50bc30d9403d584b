"""Compiled part of `alignment`: compares responses with their references, and proposes tokens of these.

Importing this module imports numba.
"""

# mypy: disable-error-code="no-untyped-def"
# Compiled functions have numba types, which annotations cannot express.

from pathlib import Path

import numpy as np

from kernels import jit
from services.generation.drafters.reference.row import (
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
    """Return the bucket of a token after `matched` matches in a row; `ramp` ends with the last bucket but one."""
    return last if matched >= UNBROKEN else ramp[min(matched, np.int64(len(ramp) - 1))]


@jit.kernel
def ends_there(references, begin, end, anchor):
    """Return True if references[begin:][:end] ends with `anchor`."""
    same = True
    for i in range(ANCHOR):
        same &= references[begin + end - ANCHOR + i] == anchor[i]
    return same


@jit.kernel
def nearest(references, begin, length, here, anchor):
    """Return the length nearest to `here`, but not `here`, at which the reference's beginning ends with `anchor`.

    Of two the longer; -1 if there is none within reach.
    """
    for distance in range(1, REACH):
        for end in (here + distance, here - distance):
            if ANCHOR <= end <= length and ends_there(references, begin, end, anchor):
                return end
    return np.int64(-1)


@jit.kernel
def agreeing(references, begin, length, end, latest):
    """Return how many of the latest tokens match the end of the reference's beginning of length `end`."""
    count = 0
    for i in range(1, min(len(latest), end) + 1):
        count += end - i < length and references[begin + end - i] == latest[-i]
    return count


@_entry
def compare(rows, lengths, tokens, cu, references, alignments, ramp, tried, kept):
    """Compare new tokens of responses, and re-align those whose latest token mismatched.

    rows [n] int64 are rows of `alignments`; lengths [n] int64 are lengths of the responses. tokens [cu[n]] int32
    are the concatenated ends of the responses, of each at least the new tokens and the last LATEST. The counts are
    added to tried and kept [sources, buckets] int64.
    """
    last = tried.shape[1] - 1
    for i in range(len(rows)):
        row = alignments[rows[i]]
        begin, length, source = row[BEGIN], row[LENGTH], row[SOURCE]
        offset, matched = row[OFFSET], row[MATCHED]
        end = lengths[i]
        if row[SEEN] == end:
            continue
        # Place of the response's first token in `tokens`.
        origin = cu[i + 1] - end
        for position in range(row[SEEN], min(end, length - offset)):
            place = position + offset
            # Outside of the reference nothing can match, so nothing is counted.
            if place >= 0:
                same = references[begin + place] == tokens[origin + position]
                bucket = bucket_of(matched, ramp, last)
                tried[source, bucket] += 1
                kept[source, bucket] += same
                matched = matched + 1 if same else np.int64(0)
        if end + offset > length:
            matched = np.int64(0)
        if matched == 0 and end >= ANCHOR:
            latest, here = tokens[cu[i + 1] - min(end, LATEST) : cu[i + 1]], end + offset
            # Outside of the reference there is nothing to propose.
            most = agreeing(references, begin, length, here, latest) if here < length else -1
            if offset != 0 and end < length:
                aligned = agreeing(references, begin, length, end, latest)
                if aligned > most:
                    offset, most = np.int64(0), aligned
            place = nearest(references, begin, length, here, latest[-ANCHOR:])
            if place >= 0 and agreeing(references, begin, length, place, latest) >= most:
                offset, matched = place - end, np.int64(ANCHOR)
        row[SEEN], row[OFFSET], row[MATCHED] = end, offset, matched


@_entry
def propose(rows, places, references, alignments, ramp, probabilities, proposed, acceptance):
    """Fill proposed and acceptance [all, window] at places [n]; return the number of samples with a proposal.

    probabilities [sources, buckets] float64.
    """
    made = 0
    last, window = probabilities.shape[1] - 1, proposed.shape[1]
    for i in range(len(rows)):
        row = alignments[rows[i]]
        here, source, matched = row[SEEN] + row[OFFSET], row[SOURCE], row[MATCHED]
        count = min(window, row[LENGTH] - here)
        if here < 0 or count <= 0:
            continue
        made += 1
        for j in range(count):
            proposed[places[i], j] = references[row[BEGIN] + here + j]
            acceptance[places[i], j] = probabilities[source, bucket_of(matched + j, ramp, last)]
    return made
