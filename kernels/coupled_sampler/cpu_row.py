"""One row of the compiled sampler: look at the logits once, draw noise only where it could matter.

The row is cut into chunks. The first pass takes the largest logit of each chunk. Noise is drawn first for
the chunk of the drafted token, or else of the row's largest logit; its winner sets the bar for the others. A
chunk whose gap to the bar no noise can bridge costs nothing; one whose integers all stay below the word that
the gap needs costs Philox but no logarithm. Both tests are exact (bounds.py). Peaked and top-p-masked rows
visit few chunks, flat ones all.

Rows are addressed by an unsigned offset in the flat logits and scratch arrays are passed one by one: slices
and tuples of arrays are reference-counted at every call, which cost a third of the time at 512 entries.
"""

# mypy: disable-error-code="no-untyped-def"
# Compiled functions carry numba types, which annotations cannot say.

import numpy as np

from kernels.coupled_sampler.bounds import (
    ABSOLUTE_SLACK,
    CELLS_PER_UNIT,
    LOWEST_GAP,
    RELATIVE_SLACK,
    UNREACHABLE,
    WORD_THRESHOLDS,
)
from kernels.coupled_sampler.cpu_noise import (
    fill_words,
    from_order_key,
    gumbel_of_word,
    order_key,
    schedule_keys,
)
from kernels.coupled_sampler.noise import MAX_POSITION
from kernels.coupled_sampler.philox import ROUNDS
from kernels.coupled_sampler.reference import INVALID
from kernels.jit import kernel

CHUNK = 128
"""Entries per chunk: enough Philox blocks to fill vector registers, few enough for a bound that tells regions
apart. 64 and 256 were slower at 512 entries; 256 gains a tenth at 32k and more."""

_CHUNK = np.uint64(CHUNK)
_TWO, _THREE = np.uint64(2), np.uint64(3)
_INVALID = np.int64(INVALID)
_MAX_POSITION = np.int64(MAX_POSITION)
_UNREACHABLE = np.uint64(UNREACHABLE)
_NO_BOUND = np.uint64(0)
_LOWEST_KEY = np.int32(-(1 << 31))
_FARTHEST = np.int32((1 << 31) - 1)
_INFINITY_BITS = np.int32(0x7F800000)
_MAGNITUDE = np.int32(0x7FFFFFFF)
_ZERO = np.float32(0.0)
_INFINITY = np.float32(np.inf)


@kernel
def make_scratch(vocab_size):
    """Buffers that rows of one size share: chunk maxima, round keys, words (as pairs and single), scores."""
    pairs = np.empty(CHUNK // 2, dtype=np.uint64)
    return (
        np.empty((vocab_size + CHUNK - 1) // CHUNK, dtype=np.float32),
        np.empty(2 * ROUNDS, dtype=np.uint64),
        pairs,
        pairs.view(np.uint32),
        np.empty(CHUNK, dtype=np.float32),
    )


@kernel
def sample_row(
    logits, row, width, seed, position, temperature, domain, hint, maxima, keys, pairs, words, scores
):
    """Token of the row logits[row : row + width], exactly reference.py's.

    logits flat float32; row, width, seed, domain uint64; position int64; temperature float32; then
    scratch. `hint` int64 is a guess of the token (negative: none): a true one makes the row cheaper.
    """
    top, valid = chunk_maxima(logits, row, width, maxima)
    if not valid or not (temperature >= _ZERO and temperature < _INFINITY):
        return _INVALID
    if position < 0 or position > _MAX_POSITION:
        return _INVALID
    if temperature == _ZERO:
        start = top * _CHUNK
        return np.int64(start + first_equal(logits, row + start, min(_CHUNK, width - start), maxima[top]))
    schedule_keys(seed, keys)
    if 0 <= hint < np.int64(width):
        top = np.uint64(hint) // _CHUNK
    place = np.uint64(position)
    best, token = -_INFINITY, _INVALID
    for visit in range(-1, len(maxima)):
        if visit == np.int64(top):
            continue
        chunk = top if visit < 0 else np.uint64(visit)
        needed = word_needed(best, maxima[chunk] / temperature)
        if needed == _UNREACHABLE:
            continue
        start = chunk * _CHUNK
        count = min(_CHUNK, width - start)
        fill_words(keys, place, domain, start >> _TWO, (count + _THREE) >> _TWO, pairs)
        if needed > _NO_BOUND and np.uint64(largest(words, count)) < needed:
            continue
        score = score_chunk(logits, row + start, count, words, temperature, scores)
        if score > best or (score == best and np.int64(start) < token):
            best = score
            token = np.int64(start + first_equal(scores, np.uint64(0), count, score))
    return token


@kernel
def chunk_maxima(logits, row, width, maxima):
    """Write each chunk's largest logit; return (first chunk with the row's, whether the row is valid)."""
    top = np.uint64(0)
    top_key = _LOWEST_KEY
    magnitude = np.int32(0)
    for chunk in range(np.uint64(len(maxima))):
        start = chunk * _CHUNK
        count = min(_CHUNK, width - start)
        key = _LOWEST_KEY
        for j in range(count):
            value = logits[row + start + j] + _ZERO  # makes -0 a +0, which compares equal but has another key
            key = max(key, order_key(value))
            magnitude = max(magnitude, np.int32(np.float32(value).view(np.int32) & _MAGNITUDE))
        maxima[chunk] = from_order_key(key)
        if key > top_key:
            top_key = key
            top = np.uint64(chunk)
    no_nan = magnitude <= _INFINITY_BITS
    return top, no_nan and maxima[top] > -_INFINITY and maxima[top] < _INFINITY


@kernel
def word_needed(best, scaled):
    """Return the least word with which an entry of at most `scaled` could reach `best`; 0 if unknown."""
    if best == -_INFINITY:
        return _NO_BOUND
    if scaled == -_INFINITY:
        return _UNREACHABLE
    slack = ABSOLUTE_SLACK + RELATIVE_SLACK * (abs(np.float64(best)) + abs(np.float64(scaled)))
    above = np.float64(best) - np.float64(scaled) - slack - LOWEST_GAP
    if not above > 0.0:  # a NaN, of two infinities, too
        return _NO_BOUND
    cell = above * CELLS_PER_UNIT
    if cell >= len(WORD_THRESHOLDS):
        return _UNREACHABLE
    return WORD_THRESHOLDS[np.uint64(cell)]


@kernel
def largest(words, count):
    """Return the largest of the first `count` uint32 words."""
    result = np.uint32(0)
    for j in range(count):
        result = max(result, words[j])
    return result


@kernel
def score_chunk(logits, start, count, words, temperature, scores):
    """Write float32(logit / T) + g of `count` entries to `scores`; return the largest."""
    key = _LOWEST_KEY
    for j in range(count):
        score = logits[start + j] / temperature + gumbel_of_word(words[j]) + _ZERO
        scores[j] = score
        key = max(key, order_key(score))
    return from_order_key(key)


@kernel
def first_equal(values, start, count, wanted):
    """Index after `start` of the first value equal to `wanted`, which is there; a minimum vectorises."""
    first = _FARTHEST
    for j in range(count):
        index = np.int32(j) if values[start + j] == wanted else _FARTHEST
        first = min(first, index)
    return np.uint64(first)
