"""One pass over the logits: each program takes a piece of one row and leaves the best token of it.

Noise is drawn where it could matter, as in cpu_row.py: a block whose gap to the best score so far no noise
bridges costs its load and a maximum; one whose integers all stay below the word that the gap needs costs Philox,
but no logarithm. Nothing is written but eight numbers a piece; triton_finish.py puts the pieces together.

Must be launched with enable_fp_fusion=False (noise.py says why).
"""

# mypy: disable-error-code="no-untyped-def,import-untyped"
# Triton's functions carry types that annotations cannot say.

import triton
import triton.language as tl

from kernels.coupled_sampler.bounds import (
    ABSOLUTE_SLACK,
    CELLS_PER_UNIT,
    LOWEST_GAP,
    RELATIVE_SLACK,
    UNREACHABLE,
    WORD_THRESHOLDS,
)
from kernels.coupled_sampler.triton_noise import gumbel_of, words_of

_CELLS, _CELLS_PER_UNIT = tl.constexpr(len(WORD_THRESHOLDS)), tl.constexpr(float(CELLS_PER_UNIT))
_LOWEST_GAP, _UNREACHABLE = tl.constexpr(LOWEST_GAP), tl.constexpr(UNREACHABLE)
# Twice those of the CPU, which computes the gap in float64.
_ABSOLUTE, _RELATIVE = tl.constexpr(2 * ABSOLUTE_SLACK), tl.constexpr(2 * RELATIVE_SLACK)
_NO_TOKEN = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _word_needed(best, scaled, table):
    """Return the least word with which an entry of at most `scaled` could reach `best`, int64; 0 if unknown."""
    slack = _ABSOLUTE + _RELATIVE * (tl.abs(best) + tl.abs(scaled))
    above = best - scaled - slack - _LOWEST_GAP
    cell = tl.minimum(above * _CELLS_PER_UNIT, _CELLS * 1.0)
    known = (best > -float("inf")) & (above > 0.0)
    inside = known & (cell < _CELLS)
    word = tl.load(table + tl.where(inside, cell, 0.0).to(tl.int32), mask=inside, other=_UNREACHABLE)
    needed = tl.where(known, word, 0)
    # An entry of -inf never wins, whatever the best is.
    return tl.where(scaled == -float("inf"), _UNREACHABLE, needed)


@triton.jit
def _first_of(values, wanted, offset):
    return tl.min(tl.where(values == wanted, offset, _NO_TOKEN), axis=0)


@triton.jit
def _sum_up(largest, total, block_largest, values):
    """Add a block to a running sum of exp(value - largest); -inf entries add nothing."""
    new = tl.maximum(largest, block_largest)
    shift = tl.where(new > -float("inf"), new, 0.0)
    return new, total * tl.exp(largest - shift) + tl.sum(tl.exp(values - shift), axis=0)


@triton.jit
def scan(
    logits, stride, width, owners, seeds, positions, temperatures, first_rows, thresholds, table, domain,
    scores, tokens, bad, raw_largest, raw_total, largest, total,
    piece, pieces, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Piece `program_id(1)` of row `program_id(0)`; the seven outputs are [rows, pieces].

    scores and tokens: the best and the lowest token that has it; bad: whether a logit is NaN or +inf. The others:
    maximum and sum of exp(entry - maximum) of the logits, and of the scaled ones that are kept.
    """
    which = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * piece
    row = logits + which * stride
    owner = tl.load(owners + which)
    seed = tl.load(seeds + owner).to(tl.uint64, bitcast=True)
    position = tl.load(positions + owner) + which - tl.load(first_rows + owner)
    temperature = tl.load(temperatures + owner)
    greedy = temperature == 0.0
    divisor = tl.where(greedy, 1.0, temperature)
    if MASKED:
        threshold = tl.load(thresholds + which)
    best = tl.full((), -float("inf"), tl.float32)
    token = tl.full((), _NO_TOKEN, tl.int32)
    spoiled = tl.full((), 0, tl.int32)
    m_raw, m = tl.full((), -float("inf"), tl.float32), tl.full((), -float("inf"), tl.float32)
    s_raw, s = tl.full((), 0.0, tl.float32), tl.full((), 0.0, tl.float32)
    for start in range(begin, tl.minimum(begin + piece, width), BLOCK):
        offset = start + tl.arange(0, BLOCK)
        x = tl.load(row + offset, mask=offset < width, other=-float("inf")).to(tl.float32)
        spoiled |= tl.max(((x != x) | (x == float("inf"))).to(tl.int32), axis=0)
        top = tl.max(x, axis=0)
        m_raw, s_raw = _sum_up(m_raw, s_raw, top, x)
        if MASKED:
            scaled = tl.div_rn(x, divisor + tl.zeros_like(x))
            kept = tl.where(scaled >= threshold, scaled, -float("inf"))
            peak = tl.max(kept, axis=0)
        else:
            # Near enough for a sum; what decides is divided as specified.
            kept = x * (1.0 / divisor)
            peak = tl.max(kept, axis=0)
        m, s = _sum_up(m, s, peak, kept)
        if greedy:
            if top > best:
                best = top
                token = _first_of(x, top, offset)
        else:
            if MASKED:
                bound = peak
            else:
                bound = tl.max(
                    tl.div_rn(top + tl.zeros((1,), tl.float32), divisor + tl.zeros((1,), tl.float32))
                )
            needed = _word_needed(best, bound, table)
            if needed < _UNREACHABLE:
                words = words_of(seed, position, domain, start, BLOCK)
                if tl.max(words.to(tl.int64), axis=0) >= needed:
                    if not MASKED:
                        scaled = tl.div_rn(x, divisor + tl.zeros_like(x))
                        score = scaled + gumbel_of(words)
                    else:
                        score = tl.where(kept > -float("inf"), kept + gumbel_of(words), -float("inf"))
                    winner = tl.max(score, axis=0)
                    if winner > best:
                        best = winner
                        token = _first_of(score, winner, offset)
    place = which * pieces + tl.program_id(1)
    tl.store(scores + place, best)
    tl.store(tokens + place, token)
    tl.store(bad + place, spoiled)
    tl.store(raw_largest + place, m_raw)
    tl.store(raw_total + place, s_raw)
    tl.store(largest + place, m)
    tl.store(total + place, s)
