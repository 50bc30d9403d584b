"""The fast CPU sampler: exactly the tokens of reference.py, on one core.

    warm_up()                                                       # once, before serving: compiles or loads
    tokens, counts = coupled_verify(logits, seeds, positions, temperature, draft_ids, cu_rows)

Arrays are numpy or CPU torch tensors (shared, not copied, if contiguous); the caller must widen bfloat16 logits.
The kernels release the GIL and start no threads. A cached compilation loads in well under a second; see jit.py for
where the cache lies and the effect of NUMBA_CACHE_DIR in a read-only container.

The compiled noise is bit for bit the specification in noise.py, written so that LLVM vectorises each loop. Philox
runs in 64-bit lanes whose upper halves hold garbage: a widening multiply reads the lower half only, so no lane is
ever shuffled. Indices are unsigned, because numba's wrap-around of negative ones prevents vectorisation. Assumes a
little-endian machine (two words are stored as one 64-bit integer). Rows are addressed by an unsigned offset in the
flat logits, and scratch arrays are passed one by one: slices and tuples of arrays are reference-counted at every
call, which cost a third of the time at 512 entries.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from numba import float32, int64, types, uint64, void
from numpy.typing import NDArray

from kernels.coupled_sampler.noise import (
    ABSOLUTE_SLACK,
    CELLS_PER_UNIT,
    EXPONENT_SHIFT,
    HALF,
    KEY_STEPS,
    LN2,
    LOG_POLYNOMIAL,
    LOWEST_GAP,
    MAX_POSITION,
    MULTIPLIERS,
    ONE,
    RELATIVE_SLACK,
    ROUNDS,
    TWO_THIRDS_BITS,
    ULP_32,
    UNREACHABLE,
    WORD_THRESHOLDS,
    Domain,
)
from kernels.coupled_sampler.reference import INVALID, UNSAMPLED, check_ragged
from kernels.jit import entry, kernel, source_fingerprint

# mypy: disable-error-code="no-untyped-def"
# Compiled functions carry numba types, which annotations cannot say.


if sys.byteorder != "little":
    raise ImportError("the CPU sampler needs a little-endian machine")

_M0, _M1 = (np.uint64(m) for m in MULTIPLIERS)
_W0, _W1 = (np.uint64(w) for w in KEY_STEPS)
_LOW = np.uint64(0xFFFFFFFF)
_WORD = np.uint64(32)
_ONE, _TWO = np.uint64(1), np.uint64(2)
_P0, _P1, _P2, _P3, _P4, _P5, _P6 = LOG_POLYNOMIAL
_TOP_EXPONENT = np.int32(32)
_SIGN_SHIFT = np.int32(31)
_MAGNITUDE = np.int32(0x7FFFFFFF)


@kernel
def schedule_keys(seed, keys):
    """Write the 2 * ROUNDS round keys of a uint64 seed to `keys` [2 * ROUNDS] uint64."""
    k0 = seed & _LOW
    k1 = seed >> _WORD
    for r in range(ROUNDS):
        keys[2 * r] = k0
        keys[2 * r + 1] = k1
        k0 = (k0 + _W0) & _LOW
        k1 = (k1 + _W1) & _LOW


@kernel
def _round(c0, c1, c2, c3, k0, k1):
    product0 = (c0 & _LOW) * _M0
    product1 = (c2 & _LOW) * _M1
    return (product1 >> _WORD) ^ c1 ^ k0, product1, (product0 >> _WORD) ^ c3 ^ k1, product0


@kernel
def fill_words(keys, position, domain, first_block, count, pairs):
    """Write the words of `count` blocks from `first_block` on (all uint64) to `pairs` [>= 2 * count] uint64.

    Viewed as uint32, `pairs` holds the words in the order of the token ids.
    """
    for j in range(count):
        c0, c1, c2, c3 = first_block + j, position, domain, np.uint64(0)
        for r in range(ROUNDS):
            c0, c1, c2, c3 = _round(c0, c1, c2, c3, keys[2 * r], keys[2 * r + 1])
        pairs[_TWO * j] = (c0 & _LOW) | (c1 << _WORD)
        pairs[_TWO * j + _ONE] = (c2 & _LOW) | (c3 << _WORD)


@kernel
def _log1p(r):
    polynomial = _P6
    polynomial = polynomial * r + _P5
    polynomial = polynomial * r + _P4
    polynomial = polynomial * r + _P3
    polynomial = polynomial * r + _P2
    polynomial = polynomial * r + _P1
    polynomial = polynomial * r + _P0
    return r + (r * r) * (polynomial * r - HALF)


@kernel
def _split(x):
    bits = np.float32(x).view(np.int32)
    exponent = np.int32(np.int32(bits - TWO_THIRDS_BITS) >> EXPONENT_SHIFT)
    return exponent, np.int32(bits - np.int32(exponent << EXPONENT_SHIFT)).view(np.float32)


@kernel
def gumbel_of_word(word):
    """Return g of one uint32 word, float32."""
    exponent, fraction = _split(np.float32(word) + HALF)
    complement = -(np.float32(np.uint32(~word)) + HALF) * ULP_32
    remainder = complement if exponent == _TOP_EXPONENT else fraction - ONE
    log_u = np.float32(np.int32(exponent - _TOP_EXPONENT)) * LN2 + _log1p(remainder)
    exponent, fraction = _split(-log_u)
    return -(np.float32(exponent) * LN2 + _log1p(fraction - ONE))


@kernel
def order_key(x):
    """Return an int32 that orders as the float32 does: maxima of integers vectorise, maxima of floats do not."""
    bits = np.float32(x).view(np.int32)
    return np.int32(bits ^ np.int32(np.int32(bits >> _SIGN_SHIFT) & _MAGNITUDE))


@kernel
def from_order_key(key):
    """Inverse of order_key: int32 -> float32."""
    return np.int32(key ^ np.int32(np.int32(key >> _SIGN_SHIFT) & _MAGNITUDE)).view(np.float32)


CHUNK = 128
"""Entries per chunk: enough Philox blocks to fill vector registers, few enough for a bound that tells regions
apart. 64 and 256 were slower at 512 entries; 256 gains a tenth at 32k and more."""

_CHUNK = np.uint64(CHUNK)
_BLOCK_SHIFT, _BLOCK_LAST = np.uint64(2), np.uint64(3)
_INVALID = np.int64(INVALID)
_MAX_POSITION = np.int64(MAX_POSITION)
_UNREACHABLE = np.uint64(UNREACHABLE)
_NO_BOUND = np.uint64(0)
_LOWEST_KEY = np.int32(-(1 << 31))
_FARTHEST = np.int32((1 << 31) - 1)
_INFINITY_BITS = np.int32(0x7F800000)
_ZERO = np.float32(0.0)
_INFINITY = np.float32(np.inf)


@kernel
def make_scratch(vocab_size):
    """Return buffers that rows of one size share: chunk maxima, round keys, words (as pairs, single), scores."""
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
    """Return the token of the row logits[row : row + width], exactly reference.py's.

    Looks at the logits once and draws noise only where it could matter. The row is cut into chunks. The first pass
    takes the largest logit of each chunk. Noise is drawn first for the chunk of the drafted token, or else of the
    row's largest logit; its winner sets the bar for the others. A chunk whose gap to the bar no noise can bridge
    costs nothing; one whose integers all stay below the word that the gap needs costs Philox but no logarithm. Both
    tests are exact (noise.py). Peaked and top-p-masked rows visit few chunks, flat ones all.

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
        fill_words(keys, place, domain, start >> _BLOCK_SHIFT, (count + _BLOCK_LAST) >> _BLOCK_SHIFT, pairs)
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
    """Return the index after `start` of the first value equal to `wanted`, which exists; a minimum vectorises."""
    first = _FARTHEST
    for j in range(count):
        index = np.int32(j) if values[start + j] == wanted else _FARTHEST
        first = min(first, index)
    return np.uint64(first)


_UNSAMPLED = np.int64(UNSAMPLED)
_NO_DRAFT = np.int64(-1)
_LOGITS = types.Array(float32, 2, "C", readonly=True)
_SEEDS = types.Array(uint64, 1, "C", readonly=True)
_INTEGERS = types.Array(int64, 1, "C", readonly=True)
_FLOATS = types.Array(float32, 1, "C", readonly=True)
_VERIFY_SIGNATURE = void(
    _LOGITS, _SEEDS, _INTEGERS, _FLOATS, _INTEGERS, _INTEGERS, uint64, int64[::1], int64[::1]
)


def coupled_argmax(
    logits: Any,
    seeds: Any,
    positions: Any,
    temperature: Any,
    out: NDArray[np.int64] | None = None,
    *,
    domain: Domain = Domain.TOKEN,
) -> NDArray[np.int64]:
    """Return argmax_v(logit_v / T + g(seed, position, v)) for each row; see coupled_argmax_reference.

    logits [N, V] float32; seeds [N] uint64 (int64 is read as two's complement); positions [N]; temperature
    [N]; `out` [N] int64 to write to. Returns [N] tokens, INVALID where a row cannot be sampled.
    """
    rows = len(seeds)
    no_drafts = np.empty(0, dtype=np.int64)
    each = np.arange(rows + 1, dtype=np.int64)
    tokens, _ = coupled_verify(logits, seeds, positions, temperature, no_drafts, each, out, domain=domain)
    return tokens


def coupled_verify(
    logits: Any,
    seeds: Any,
    positions: Any,
    temperature: Any,
    draft_ids: Any,
    cu_rows: Any,
    out: NDArray[np.int64] | None = None,
    *,
    domain: Domain = Domain.TOKEN,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sample the target's tokens and verify drafts, each request only up to its first mismatch.

    Request n of N has rows cu_rows[n] : cu_rows[n + 1] of logits [R, V] float32: one for each of its k >= 0
    drafts and one more (k = 0 is plain decoding). seeds [N], temperature [N]; positions [N] of its first row;
    draft_ids [R - N] one request after the other.

    Returns (tokens [R], counts [N]): request n emits tokens[cu_rows[n] : cu_rows[n] + counts[n]], its
    accepted drafts and the target's own next token. Rows behind that are UNSAMPLED and cost nothing. A row
    that cannot be sampled ends its request with INVALID as the last token emitted.

    TypeError for logits that are not float32, ValueError for wrong shapes.
    """
    logits = _check_logits(logits)
    cu_rows, positions, draft_ids = (_vector(a, np.int64) for a in (cu_rows, positions, draft_ids))
    seeds, temperature = _vector(seeds, np.uint64), _vector(temperature, np.float32)
    check_ragged(len(logits), len(draft_ids), cu_rows)
    requests = len(cu_rows) - 1
    if not len(seeds) == len(positions) == len(temperature) == requests:
        raise ValueError(
            f"{requests} requests, but {len(seeds)} seeds, {len(positions)} positions, "
            f"{len(temperature)} temperatures"
        )
    tokens = np.empty(len(logits), dtype=np.int64) if out is None else _check_out(out, len(logits))
    counts = np.empty(requests, dtype=np.int64)
    arrays = (logits, seeds, positions, temperature, draft_ids, cu_rows)
    _verify_rows(*(_readonly(a) for a in arrays), np.uint64(domain), tokens, counts)
    return tokens, counts


def warm_up() -> None:
    """Compile the sampler, or load it from the cache, so that the first step does not pay for it."""
    if not _verify_rows.signatures:
        _verify_rows.compile(_VERIFY_SIGNATURE)


@entry(source_fingerprint(Path(__file__).parent))
def _verify_rows(logits, seeds, positions, temperature, draft_ids, cu_rows, domain, tokens, counts):
    width = np.uint64(logits.shape[1])
    flat = logits.reshape(-1)
    maxima, keys, pairs, words, scores = make_scratch(logits.shape[1])
    for n in range(len(counts)):
        first, end = cu_rows[n], cu_rows[n + 1]
        row = first
        while True:
            start, position = np.uint64(row) * width, positions[n] + (row - first)
            # The drafts of request n start n entries before its rows: each earlier request has one fewer.
            draft = draft_ids[row - n] if row + 1 < end else _NO_DRAFT
            token = sample_row(
                flat, start, width, seeds[n], position, temperature[n], domain, draft,
                maxima, keys, pairs, words, scores,
            )  # fmt: skip
            tokens[row] = token
            row += 1
            if row == end or token < 0 or token != draft:
                break
        counts[n] = row - first
        tokens[row:end] = _UNSAMPLED


def _check_logits(logits: Any) -> NDArray[np.float32]:
    array = np.asarray(logits)
    if array.dtype != np.float32:
        raise TypeError(f"logits must be float32, got {array.dtype}")
    if array.ndim != 2 or array.shape[1] == 0:
        raise ValueError(f"logits must be [rows, vocabulary], got {list(array.shape)}")
    return np.ascontiguousarray(array)


def _check_out(out: NDArray[np.int64], rows: int) -> NDArray[np.int64]:
    if out.dtype != np.int64 or out.shape != (rows,) or not out.flags.c_contiguous:
        raise ValueError(f"out must be {rows} contiguous int64, got {list(out.shape)} {out.dtype}")
    return out


def _vector(values: Any, dtype: Any) -> NDArray[Any]:
    array = np.ascontiguousarray(values, dtype=dtype)
    if array.ndim != 1:
        raise ValueError(f"expected one dimension, got {list(array.shape)}")
    return array


def _readonly(array: NDArray[Any]) -> NDArray[Any]:
    """Return a read-only view, so that one compiled signature serves writable and read-only arrays."""
    view = array.view()
    view.flags.writeable = False
    return view
