"""The noise of noise.py in Triton, bit for bit. Kernels that use it are launched with enable_fp_fusion=False.

Order keys are like those in cpu.py, but unsigned: a larger float has the larger key.
"""

# mypy: disable-error-code="no-untyped-def,import-untyped"
# Triton's functions carry types that annotations cannot say.

import triton
import triton.language as tl

from kernels.coupled_sampler.noise import (
    EXPONENT_SHIFT,
    HALF,
    KEY_STEPS,
    LN2,
    LOG_POLYNOMIAL,
    MULTIPLIERS,
    ROUNDS,
    TWO_THIRDS_BITS,
    ULP_32,
)

_M0, _M1 = (tl.constexpr(m) for m in MULTIPLIERS)
_W0, _W1 = (tl.constexpr(w) for w in KEY_STEPS)
_ROUNDS = tl.constexpr(ROUNDS)
_P0, _P1, _P2, _P3, _P4, _P5, _P6 = (tl.constexpr(float(p)) for p in LOG_POLYNOMIAL)
_LN2, _HALF, _ULP_32 = (tl.constexpr(float(c)) for c in (LN2, HALF, ULP_32))
_TWO_THIRDS_BITS = tl.constexpr(int(TWO_THIRDS_BITS))
_EXPONENT_SHIFT = tl.constexpr(int(EXPONENT_SHIFT))


@triton.jit
def _product(a, m: tl.constexpr, WIDE: tl.constexpr):
    """Return the upper and the lower 32 bits of uint32 `a` times `m`."""
    if WIDE:
        wide = a.to(tl.uint64) * m
        return (wide >> 32).to(tl.uint32), wide.to(tl.uint32)
    else:
        factor = tl.full((1,), m, tl.uint32)
        return tl.umulhi(a, factor), a * factor


@triton.jit
def words_of(seed, position, domain, first, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """Return the words of `BLOCK` tokens from `first`, a multiple of 4: four of [BLOCK / 4] uint32.

    The first tensor has the words of tokens first + 4 i, the second of first + 4 i + 1, and so on. They stay
    separate: if they were joined, the compiler would draw them twice, once for each layout that it needs. The seed
    is uint64, the position int64.
    """
    c0 = (first // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    zero = tl.zeros((BLOCK // 4,), tl.uint32)
    c1 = zero + (position & 0xFFFFFFFF).to(tl.uint32)
    # An argument that is 1 is a constant to Triton, and no tensor; cast takes both.
    c2 = zero + tl.cast(domain, tl.uint32)
    c3 = zero
    # 64 bits wide, so that a step of a key overflows nothing.
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in tl.static_range(_ROUNDS):
        high0, low0 = _product(c0, _M0, WIDE)
        high1, low1 = _product(c2, _M1, WIDE)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0.to(tl.uint32), low1, high0 ^ c3 ^ k1.to(tl.uint32), low0
        k0 = (k0 + _W0) & 0xFFFFFFFF
        k1 = (k1 + _W1) & 0xFFFFFFFF
    return c0, c1, c2, c3


@triton.jit
def _log1p(r):
    polynomial = _P6 * r + _P5
    polynomial = polynomial * r + _P4
    polynomial = polynomial * r + _P3
    polynomial = polynomial * r + _P2
    polynomial = polynomial * r + _P1
    polynomial = polynomial * r + _P0
    return r + (r * r) * (polynomial * r - _HALF)


@triton.jit
def _split(x):
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - _TWO_THIRDS_BITS) >> _EXPONENT_SHIFT
    return exponent, (bits - (exponent << _EXPONENT_SHIFT)).to(tl.float32, bitcast=True)


@triton.jit
def gumbel_of(word):
    """Return g of uint32 words, float32."""
    exponent, fraction = _split(word.to(tl.float32) + _HALF)
    complement = -((word ^ 0xFFFFFFFF).to(tl.uint32).to(tl.float32) + _HALF) * _ULP_32
    remainder = tl.where(exponent == 32, complement, fraction - 1.0)
    log_u = (exponent - 32).to(tl.float32) * _LN2 + _log1p(remainder)
    exponent, fraction = _split(-log_u)
    return -(exponent.to(tl.float32) * _LN2 + _log1p(fraction - 1.0))


@triton.jit
def order_key(x):
    """Return a uint32 with the order of the float32; -0 is +0. Meaningless for NaN."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit
def of_order_key(key):
    """Inverse of order_key: uint32 -> float32."""
    signed = key.to(tl.int32, bitcast=True)
    return (signed ^ ((~signed >> 31) | -2147483648)).to(tl.float32, bitcast=True)
