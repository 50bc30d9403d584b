"""The thresholds of masks.py in Triton, without a sort: a search over the order keys of a row, four bits a pass.

For a measure that falls as the key rises (how many entries have at least this key, or their mass) the search
finds the largest key whose measure still reaches a target: eight passes over the row, whatever it holds, and a
block whose largest key lies below what is already known adds nothing. A program does one row.
"""

# mypy: disable-error-code="no-untyped-def,import-untyped"
# Triton's functions carry types that annotations cannot say.

import triton
import triton.language as tl

from kernels.coupled_sampler.masks import EXP_SERIES, LN2_HIGH, LN2_LOW, LOG2E, LOWEST, MASS_BITS, ROUND
from kernels.coupled_sampler.triton_noise import of_order_key, order_key

_E0, _E1, _E2, _E3, _E4, _E5, _E6, _E7 = (tl.constexpr(float(c)) for c in EXP_SERIES)
_LN2_HIGH, _LN2_LOW = tl.constexpr(float(LN2_HIGH)), tl.constexpr(float(LN2_LOW))
_LOG2E, _LOWEST, _ROUND = (tl.constexpr(float(c)) for c in (LOG2E, LOWEST, ROUND))
_BIAS = tl.constexpr(127 + MASS_BITS)


@triton.jit
def mass_of(below):
    """int64 mass of entries by how far they lie below the largest (<= 0)."""
    d = tl.maximum(below, _LOWEST)
    n = (d * _LOG2E + _ROUND) - _ROUND
    r = (d - n * _LN2_HIGH) - n * _LN2_LOW
    series = _E7 * r + _E6
    series = series * r + _E5
    series = series * r + _E4
    series = series * r + _E3
    series = series * r + _E2
    series = series * r + _E1
    series = series * r + _E0
    scale = ((n.to(tl.int32) + _BIAS) << 23).to(tl.float32, bitcast=True)
    return tl.where(below > _LOWEST, (series * scale).to(tl.int64), 0)


@triton.jit
def _scaled(row, offset, width, temperature):
    """Scaled logits of a block, -inf behind the row's end."""
    x = tl.load(row + offset, mask=offset < width, other=-float("inf")).to(tl.float32)
    return tl.div_rn(x, temperature + tl.zeros_like(x))


@triton.jit
def _search(row, width, temperature, largest, target, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the largest key at which the measure of entries with at least this key reaches `target`, float64."""
    found = tl.zeros((), tl.int64)
    for digit in range(8):
        shift = 28 - 4 * digit
        pivots = found + (tl.arange(0, 16).to(tl.int64) << shift)
        measures = tl.zeros((16,), tl.int64)
        for start in range(0, width, BLOCK):
            offset = start + tl.arange(0, BLOCK)
            x = _scaled(row, offset, width, temperature)
            key = order_key(x).to(tl.int64)
            counted = (offset < width) & (key >= found)
            if tl.max(counted.to(tl.int32), axis=0) > 0:
                weight = counted.to(tl.int64)
                if MASS:
                    weight *= mass_of(x - largest)
                above = key[None, :] >= pivots[:, None]
                measures += tl.sum(tl.where(above, weight[None, :], 0), axis=1)
        # Pivot 0 is what is known to reach it; of the others as many do as the digit says.
        reached = (measures.to(tl.float64) >= target) & (tl.arange(0, 16) > 0)
        found += tl.sum(reached.to(tl.int64), axis=0) << shift
    return found


@triton.jit
def thresholds(
    logits, stride, width, owners, temperatures, top_k, top_p, out,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the threshold of each row, float32; -inf for a row that is greedy, unmasked or not valid."""
    which = tl.program_id(0).to(tl.int64)
    row = logits + which * stride
    owner = tl.load(owners + which)
    temperature = tl.load(temperatures + owner)
    result = tl.full((), -float("inf"), tl.float32)
    if (temperature > 0.0) & (temperature < float("inf")):
        maxima = tl.full((BLOCK,), -float("inf"), tl.float32)
        spoiled = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, width, BLOCK):
            x = _scaled(row, start + tl.arange(0, BLOCK), width, temperature)
            maxima = tl.maximum(maxima, x)
            spoiled |= (x != x).to(tl.int32)
        largest = tl.max(maxima, axis=0)
        finite = (largest < float("inf")) & (largest > -float("inf"))
        if finite & (tl.max(spoiled, axis=0) == 0):
            floor = tl.zeros((), tl.int64)
            if TOP_K:
                k = tl.load(top_k + owner)
                if (k >= 1) & (k < width):
                    target = k.to(tl.float64)
                    floor = _search(row, width, temperature, largest, target, MASS=False, BLOCK=BLOCK)
                    result = of_order_key(floor.to(tl.uint32))
            if TOP_P:
                p = tl.load(top_p + owner)
                if p < 1.0:
                    total = tl.zeros((BLOCK,), tl.int64)
                    for start in range(0, width, BLOCK):
                        offset = start + tl.arange(0, BLOCK)
                        x = _scaled(row, offset, width, temperature)
                        counted = (offset < width) & (order_key(x).to(tl.int64) >= floor)
                        total += tl.where(counted, mass_of(x - largest), 0)
                    target = p.to(tl.float64) * tl.sum(total, axis=0).to(tl.float64)
                    # All that top-k keeps reaches the target, so the key is not below its.
                    key = _search(row, width, temperature, largest, target, MASS=True, BLOCK=BLOCK)
                    # With p of 0 every key reaches the target; the largest entry is kept all the same.
                    result = tl.minimum(of_order_key(key.to(tl.uint32)), largest)
    tl.store(out + which, result)
