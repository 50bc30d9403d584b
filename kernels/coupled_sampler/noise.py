"""The noise of coupled sampling: its specification, its plain numpy reference, and an exact bound.

Philox4x32-10: the counter-based generator under all noise of Paceline (Salmon et al., SC'11). A block is a pure
function of a 128-bit counter and a 64-bit key, so noise needs no state, and any element can be computed anywhere,
in any order. Known-answer vectors (Random123), checked by the tests:

    counter                             key                result
    00000000 00000000 00000000 00000000 00000000 00000000  6627e8d5 e169c58d bc57ac4c 9b00dbd8
    ffffffff ffffffff ffffffff ffffffff ffffffff ffffffff  408f276d 41c83b0e a20bc7c6 6d5451fd
    243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0  d16cfe09 94fdcceb 5001e420 24126ea1

Ten rounds, although seven pass the statistical test batteries: our keys are hashes, but counters are small
neighbouring integers, and the two words of the counter that differ deserve the full margin.

`g(seed, position, token)` is standard Gumbel noise and a pure function of three integers:

    seed      64 bit, of the sample (services/contracts/seeds.py)
    position  32 bit, the count of tokens of the sample so far, tool tokens included, prompt excluded
    token     token id; one Philox block serves four neighbouring ids

**Integers.** With Philox4x32-10 (above), key = (seed mod 2**32, seed div 2**32):

    word = philox(counter=(token div 4, position, Domain.TOKEN, 0), key)[token mod 4]

Every implementation yields these integers exactly. The third counter word keeps the noise of other uses apart
(`Domain`); uniforms have block 0 and their `Purpose` in the fourth word.

**Uniform.** u = (word + 1/2) / 2**32, so 0 and 1 cannot occur and u is symmetric about 1/2.

**Gumbel.** g = -ln(-ln u), rising in the word, from G_MIN = -3.13 (word 0) to G_MAX = 22.874 (word 2**32-1,
-ln u = 2**-33, so g = 33 ln 2). u itself does not fit float32 near 1, where the winners of an arg-max are:
1 - u is therefore formed from the complementary integer, which keeps its relative precision. With 32 bits
a flat vocabulary of 150,000 entries has its two best entries on one word (a tie) once in 57,000 draws; with
24 bits it would be once in 220.

**Floats.** The map uses only IEEE float32 additions, multiplications and bit operations in the order written
here, no library logarithm, so equal logits give equal tokens on every device that (a) rounds to nearest,
(b) does not fuse multiply-adds (Triton: `enable_fp_fusion=False`) and (c) divides logit by T with correct
rounding (Triton: `div_rn`). With x = f * 2**e and f in [2/3, 4/3):

    log1p(r)  = r + (r*r) * (r*P(r) - 1/2), P by Horner's rule (LOG_POLYNOMIAL; relative error 4e-8)
    split(x)  : e = (bits(x) - bits(2/3)) >> 23 (arithmetic); f = from_bits(bits(x) - (e << 23))
    ln_u      : e, f = split(float32(word) + 0.5); r = f - 1, but if e = 32 then
                r = -(float32(2**32 - 1 - word) + 0.5) * 2**-32;   ln u = (e - 32) * LN2 + log1p(r)
    g         : e, f = split(-ln u);   g = -(e * LN2 + log1p(f - 1))

Checked once: over all 2**32 words g never falls; its error is below 2e-6, one float32 ulp at 22. An
implementation with another logarithm (a GPU's fast one) still takes the same token unless the two best scores lie
within the sum of both errors, about 4e-6, which is what rounding does to the logits themselves.

**Token.** argmax over v of float32(float32(logit_v / T) + g_v), ties to the lowest id (reference.py).

Known answers for seed 0x0123456789ABCDEF, position 7, tokens 0..5 (floats are exact):

    word  855a5df1    425715c3     12d22138    84949d54    e0cff381  0da312fc
    g     0.42743823  -0.30038732  -0.9594321  0.41856965  2.0409012  -1.0758178

**Bound.** `WORD_THRESHOLDS` tells which integers could still beat the best score, so that most noise need not be
drawn. g rises with its word, so an entry of scaled logit s beats a score only if its word reaches the first word
with g >= score - s. A table of those words over a grid of gaps answers that without a logarithm, rounded down to
the grid and by a slack that covers every float32 rounding, so no possible winner is ever left out.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)

_LOW = np.uint64(0xFFFFFFFF)
_WORD = np.uint64(32)


def split_seed(seed: int) -> tuple[int, int]:
    """Return the Philox key of a 64-bit seed: (low word, high word). ValueError outside [0, 2**64)."""
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"seed must be in [0, 2**64), got {seed}")
    return seed & 0xFFFFFFFF, seed >> 32


def philox4x32(counter: NDArray[np.uint32], key: tuple[int, int]) -> NDArray[np.uint32]:
    """Return one block per counter: `counter` [..., 4] uint32 -> [..., 4] uint32, `key` two 32-bit words."""
    c0, c1, c2, c3 = (counter[..., lane].astype(np.uint64) for lane in range(4))
    k0, k1 = key
    for _ in range(ROUNDS):
        product0 = c0 * np.uint64(MULTIPLIERS[0])
        product1 = c2 * np.uint64(MULTIPLIERS[1])
        c0, c1, c2, c3 = (
            _high(product1) ^ c1 ^ np.uint64(k0),
            product1 & _LOW,
            _high(product0) ^ c3 ^ np.uint64(k1),
            product0 & _LOW,
        )
        k0 = (k0 + KEY_STEPS[0]) & 0xFFFFFFFF
        k1 = (k1 + KEY_STEPS[1]) & 0xFFFFFFFF
    return np.stack((c0, c1, c2, c3), axis=-1).astype(np.uint32)


def _high(product: Any) -> Any:
    """Return the upper 32 bits of 64-bit products."""
    return product >> _WORD


MAX_POSITION = (1 << 32) - 1

LN2 = np.float32(0.6931472)
# Minimax fit of (log1p(r) - r + r*r/2) / r**3 on [-1/3, 1/3], weighted for the relative error of log1p;
# lowest degree first.
LOG_POLYNOMIAL = tuple(
    np.float32(c)
    for c in (0.33333266, -0.25004232, 0.20007917, -0.16472466, 0.14042355, -0.15121378, 0.138199836)
)
TWO_THIRDS_BITS = np.int32(0x3F2AAAAB)
EXPONENT_SHIFT = np.int32(23)
ULP_32 = np.float32(2.0**-32)
HALF = np.float32(0.5)
ONE = np.float32(1.0)


class Domain(IntEnum):
    """Third counter word: draws of unlike use never share a Philox block."""

    TOKEN = 1
    """The noise that chooses a sample's tokens; drafters that share it agree with the target."""
    RESIDUAL = 2
    """Gumbel noise independent of TOKEN: residual sampling after a rejected draft."""
    UNIFORM = 3
    """Domain of uniforms, which `Purpose` distinguishes."""


class Purpose(IntEnum):
    """Fourth counter word of uniform draws."""

    LENIENT = 1
    """Acceptance of a cached token by SPEC-RL's rule."""
    REJECTION = 2
    """Acceptance of a drafted token by standard speculative sampling."""


def words(seed: int, position: int, vocab_size: int, domain: Domain = Domain.TOKEN) -> NDArray[np.uint32]:
    """Return the integers of one position: [vocab_size] uint32. ValueError for a seed or position out of range."""
    _check_position(position)
    blocks = (vocab_size + 3) // 4
    counter = np.zeros((blocks, 4), dtype=np.uint32)
    counter[:, 0] = np.arange(blocks)
    counter[:, 1] = position
    counter[:, 2] = domain
    return philox4x32(counter, split_seed(seed)).reshape(-1)[:vocab_size]


def gumbel(seed: int, position: int, vocab_size: int, domain: Domain = Domain.TOKEN) -> NDArray[np.float32]:
    """Return g(seed, position, token) for every token id: [vocab_size] float32 in [G_MIN, G_MAX]."""
    return gumbel_of_words(words(seed, position, vocab_size, domain))


def uniform(seed: int, position: int, purpose: Purpose) -> float:
    """Return one uniform in (0, 1), exact in float64, independent of all token noise and of other purposes."""
    _check_position(position)
    counter = np.array([0, position, Domain.UNIFORM, purpose], dtype=np.uint32)
    return (int(philox4x32(counter, split_seed(seed))[0]) + 0.5) * 2.0**-32


def gumbel_of_words(word: NDArray[np.uint32]) -> NDArray[np.float32]:
    """Return the Gumbel map on integers of any shape: uint32 -> float32, bit for bit as specified above."""
    exponent, fraction = _split(word.astype(np.float32) + HALF)
    complement = -((~word).astype(np.float32) + HALF) * ULP_32
    remainder = np.where(exponent == 32, complement, fraction - ONE)
    log_u = (exponent - np.int32(32)).astype(np.float32) * LN2 + _log1p(remainder)
    exponent, fraction = _split(-log_u)
    return -(exponent.astype(np.float32) * LN2 + _log1p(fraction - ONE))


def _split(x: NDArray[np.float32]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """x = fraction * 2**exponent with the fraction in [2/3, 4/3), for positive normal x."""
    bits = x.view(np.int32)
    exponent = (bits - TWO_THIRDS_BITS) >> EXPONENT_SHIFT
    return exponent, (bits - (exponent << EXPONENT_SHIFT)).view(np.float32)


def _log1p(r: NDArray[np.float32]) -> NDArray[np.float32]:
    polynomial = np.full_like(r, LOG_POLYNOMIAL[-1])
    for coefficient in LOG_POLYNOMIAL[-2::-1]:
        polynomial = polynomial * r + coefficient
    return r + (r * r) * (polynomial * r - HALF)


def _check_position(position: int) -> None:
    if not 0 <= position <= MAX_POSITION:
        raise ValueError(f"position must be in [0, 2**32), got {position}")


G_MIN, G_MAX = (float(g) for g in gumbel_of_words(np.array([0, 0xFFFFFFFF], dtype=np.uint32)))


CELLS_PER_UNIT = 16
LOWEST_GAP = float(np.floor(G_MIN))
UNREACHABLE = 1 << 32
"""Above every word: no noise bridges the gap."""

ABSOLUTE_SLACK = 1e-3
RELATIVE_SLACK = 2.0**-21
"""Above eight roundings of a score, each at most 2**-24 of its size."""


def word_thresholds() -> NDArray[np.uint64]:
    """Return as entry i the first word with g(word) >= LOWEST_GAP + i / CELLS_PER_UNIT, or UNREACHABLE."""
    cells = int(np.ceil((G_MAX - LOWEST_GAP) * CELLS_PER_UNIT)) + 1
    gaps = LOWEST_GAP + np.arange(cells) / CELLS_PER_UNIT
    low = np.zeros(cells, dtype=np.uint64)
    high = np.full(cells, UNREACHABLE, dtype=np.uint64)
    for _ in range(33):
        middle = (low + high) // np.uint64(2)
        reaches = gumbel_of_words(np.minimum(middle, 0xFFFFFFFF).astype(np.uint32)) >= gaps
        reaches |= middle >= UNREACHABLE
        high = np.where(reaches, middle, high)
        low = np.where(reaches | (low == high), low, np.minimum(middle + np.uint64(1), high))
    return high


WORD_THRESHOLDS = word_thresholds()
