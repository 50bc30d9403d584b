"""Compiled noise for many tokens at once, bit for bit the specification in noise.py.

Written so that LLVM turns each loop into vector instructions. Philox runs in 64-bit lanes whose upper
halves hold garbage: a widening multiply reads the lower half only, so no lane is ever shuffled.
Indices are unsigned, else numba's wrap-around of negative ones would be in the way.
Assumes a little-endian machine (two words are stored as one 64-bit integer).
"""

# mypy: disable-error-code="no-untyped-def"
# Compiled functions carry numba types, which annotations cannot say.

import sys

import numpy as np

from kernels.coupled_sampler.noise import (
    EXPONENT_SHIFT,
    HALF,
    LN2,
    LOG_POLYNOMIAL,
    ONE,
    TWO_THIRDS_BITS,
    ULP_32,
)
from kernels.coupled_sampler.philox import KEY_STEPS, MULTIPLIERS, ROUNDS
from kernels.jit import kernel

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
    """g of one uint32 word, float32."""
    exponent, fraction = _split(np.float32(word) + HALF)
    complement = -(np.float32(np.uint32(~word)) + HALF) * ULP_32
    remainder = complement if exponent == _TOP_EXPONENT else fraction - ONE
    log_u = np.float32(np.int32(exponent - _TOP_EXPONENT)) * LN2 + _log1p(remainder)
    exponent, fraction = _split(-log_u)
    return -(np.float32(exponent) * LN2 + _log1p(fraction - ONE))


@kernel
def order_key(x):
    """Return an int32 that orders as the float32 does: maxima of integers vectorise, those of floats do not."""
    bits = np.float32(x).view(np.int32)
    return np.int32(bits ^ np.int32(np.int32(bits >> _SIGN_SHIFT) & _MAGNITUDE))


@kernel
def from_order_key(key):
    """Inverse of order_key: int32 -> float32."""
    return np.int32(key ^ np.int32(np.int32(key >> _SIGN_SHIFT) & _MAGNITUDE)).view(np.float32)
