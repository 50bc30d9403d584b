"""One row of the compiled sampler: look at the logits once, draw noise only where it could matter.

The row is cut into chunks. The first pass takes the largest logit of each chunk. Noise is drawn for the chunk
of the row's largest logit first; its winner sets the bar for the others. A chunk whose gap to the bar no noise
can bridge costs nothing; one whose integers all stay below the word that the gap needs costs Philox but no
logarithm. Both tests are exact (bounds.py), so peaked and top-p-masked rows visit few chunks, flat rows all.
"""

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
from kernels.coupled_sampler.jit import kernel
from kernels.coupled_sampler.noise import MAX_POSITION
from kernels.coupled_sampler.reference import INVALID

CHUNK = 128
"""Entries per chunk: a few vector registers of Philox blocks, and a bound that still tells regions apart."""

_MAX_POSITION = np.int64(MAX_POSITION)
_UNREACHABLE = np.uint64(UNREACHABLE)
_ANY = np.uint64(0)
_LOWEST_KEY = np.int32(-(1 << 31))
_INFINITY_BITS = np.int32(0x7F800000)
_MAGNITUDE = np.int32(0x7FFFFFFF)
_FARTHEST = np.int32(0x7FFFFFFF)
_ZERO = np.float32(0.0)
_INFINITY = np.float32(np.inf)
_CELLS = np.float64(CELLS_PER_UNIT)


@kernel
def sample_row(row, seed, position, temperature, domain, maxima, keys, pairs, scores):  # type: ignore[no-untyped-def]
    """Token of one row, exactly reference.py's; `maxima` [chunks], `keys`, `pairs`, `scores` are scratch."""
    top, valid = chunk_maxima(row, maxima)
    if not valid or not (temperature >= _ZERO and temperature < _INFINITY):
        return np.int64(INVALID)
    if position < 0 or position > _MAX_POSITION:
        return np.int64(INVALID)
    if temperature == _ZERO:
        return first_equal(row[top * CHUNK : (top + 1) * CHUNK], maxima[top]) + top * CHUNK
    schedule_keys(seed, keys)
    best = -_INFINITY
    token = np.int64(INVALID)
    counter_position = np.uint64(position)
    for visit in range(-1, len(maxima)):
        chunk = top if visit < 0 else visit
        if visit == top:
            continue
        needed = word_needed(best, maxima[chunk] / temperature)
        if needed == _UNREACHABLE:
            continue
        start = chunk * CHUNK
        part = row[start : start + CHUNK]
        blocks = pairs[: 2 * ((len(part) + 3) >> 2)]
        fill_words(keys, counter_position, domain, start >> 2, blocks)
        words = blocks.view(np.uint32)
        if needed > _ANY and np.uint64(largest(words)) < needed:
            continue
        score = score_chunk(part, words, temperature, scores)
        if score > best or (score == best and chunk < token // CHUNK):
            best = score
            token = first_equal(scores[: len(part)], score) + start
    return token


@kernel
def chunk_maxima(row, maxima):  # type: ignore[no-untyped-def]
    """Write each chunk's largest logit; return (first chunk that holds the row's, whether the row is samplable)."""
    top = 0
    top_key = _LOWEST_KEY
    magnitude = np.int32(0)
    for chunk in range(len(maxima)):
        part = row[chunk * CHUNK : (chunk + 1) * CHUNK]
        key = _LOWEST_KEY
        for j in range(len(part)):
            value = part[j] + _ZERO  # makes -0 a +0, which compares equal but has another key
            key = max(key, order_key(value))
            magnitude = max(magnitude, np.int32(np.float32(value).view(np.int32) & _MAGNITUDE))
        maxima[chunk] = from_order_key(key)
        if key > top_key:
            top_key = key
            top = chunk
    nan = magnitude > _INFINITY_BITS
    return top, not nan and -_INFINITY < maxima[top] and maxima[top] < _INFINITY


@kernel
def word_needed(best, scaled):  # type: ignore[no-untyped-def]
    """The least word with which an entry of at most `scaled` could reach `best`; 0 if that is not known."""
    if best == -_INFINITY:
        return _ANY
    if scaled == -_INFINITY:
        return _UNREACHABLE
    slack = ABSOLUTE_SLACK + RELATIVE_SLACK * (abs(np.float64(best)) + abs(np.float64(scaled)))
    gap = np.float64(best) - np.float64(scaled) - slack
    if not gap > LOWEST_GAP:  # a NaN of two infinities too
        return _ANY
    cell = (gap - LOWEST_GAP) * _CELLS
    if cell >= len(WORD_THRESHOLDS):
        return _UNREACHABLE
    return WORD_THRESHOLDS[np.int64(cell)]


@kernel
def largest(words):  # type: ignore[no-untyped-def]
    """The largest of some uint32 words."""
    result = np.uint32(0)
    for j in range(len(words)):
        result = max(result, words[j])
    return result


@kernel
def score_chunk(part, words, temperature, scores):  # type: ignore[no-untyped-def]
    """Write float32(part / T) + g to `scores`; return the largest."""
    key = _LOWEST_KEY
    for j in range(len(part)):
        score = part[j] / temperature + gumbel_of_word(words[j]) + _ZERO
        scores[j] = score
        key = max(key, order_key(score))
    return from_order_key(key)


@kernel
def first_equal(values, wanted):  # type: ignore[no-untyped-def]
    """Index of the first of `values` equal to `wanted`, which is among them; a minimum, since that vectorises."""
    first = np.int32(len(values))
    for j in range(len(values)):
        index = np.int32(j) if values[j] == wanted else _FARTHEST
        first = min(first, index)
    return np.int64(first)
