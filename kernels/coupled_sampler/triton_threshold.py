"""The thresholds of reference.py in Triton, without a sort, by all multiprocessors whatever the number of rows.

For a measure that falls as entries get smaller (their number, or their mass) a search finds the largest key at
which the measure of all entries with at least this key still reaches a target. Entries lie in 16 buckets of two
units below the row's largest one; the entries of the bucket in which the target is reached lie in 16 buckets of an
eighth. That takes two passes, in which each program sums up a piece of a row and adds its 16 integers to the row's.
A third pass collects the keys of the last bucket, some thousands, among which one program finds the key, four bits
at a time. Integers have no order of summation, so the result is bit for bit that of reference.py, however rows are
cut.

A launch takes the rows of a step that lie in one tensor: `places` are their numbers in the step, which index the
results, and `sources` their rows in that tensor.
"""

# mypy: disable-error-code="no-untyped-def,import-untyped"
# Triton's functions carry types that annotations cannot say.

import triton
import triton.language as tl

from kernels.coupled_sampler.reference import EXP_SERIES, LN2_HIGH, LN2_LOW, LOG2E, LOWEST, MASS_BITS, ROUND
from kernels.coupled_sampler.triton_noise import of_order_key, order_key

MOST_PIECES = 64
"""Most pieces of a row, and the distance of two rows in the results of the scan."""
CAPACITY = 1 << 14
"""Most collected keys of a row; the keys of a fuller bucket are read from the row again."""
STATE = 40
"""int64 values of a row: the sums of two levels, the number of collected keys, and padding for alignment."""
_E0, _E1, _E2, _E3, _E4, _E5, _E6, _E7 = (tl.constexpr(float(c)) for c in EXP_SERIES)
_LN2_HIGH, _LN2_LOW = tl.constexpr(float(LN2_HIGH)), tl.constexpr(float(LN2_LOW))
_LOG2E, _LOWEST, _ROUND = (tl.constexpr(float(c)) for c in (LOG2E, LOWEST, ROUND))
_BIAS = tl.constexpr(127 + MASS_BITS)
_PIECES, _CAPACITY, _STATE = tl.constexpr(MOST_PIECES), tl.constexpr(CAPACITY), tl.constexpr(STATE)
_BUCKETS, _COLLECTED = tl.constexpr(16), tl.constexpr(32)
_KEY_OF_OFF = tl.constexpr(0x007FFFFF)
"""order_key of -inf; lower keys belong to NaN."""


@triton.jit
def mass_of(below):
    """int64 mass of entries by how far they lie below the largest (<= 0); 0 for NaN."""
    counted = below > _LOWEST
    # No maximum: its result for NaN differs between versions of Triton, and NaN must never become an integer.
    d = tl.where(counted, below, _LOWEST)
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
    return tl.where(counted, (series * scale).to(tl.int64), 0)


@triton.jit(do_not_specialize=["blocks"])
def peaks(
    logits, stride, width, places, sources, out, lowest, blocks,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a piece's largest logit to `out` [rows, MOST_PIECES], +inf if one is NaN; no threshold to `lowest`."""
    which = tl.load(places + tl.program_id(0))
    own_row = logits + tl.load(sources + tl.program_id(0)) * stride
    begin = tl.program_id(1) * blocks * BLOCK
    most = tl.full((BLOCK,), -float("inf"), tl.float32)
    for start in tl.range(begin, tl.minimum(begin + blocks * BLOCK, width), BLOCK, num_stages=3):
        offset = start + tl.arange(0, BLOCK)
        x = tl.load(own_row + offset, mask=offset < width, other=-float("inf")).to(tl.float32)
        most = tl.maximum(most, tl.where(x == x, x, float("inf")))
    tl.store(out + which * _PIECES + tl.program_id(1), tl.max(most, axis=0))
    if tl.program_id(1) == 0:
        tl.store(lowest + which, -float("inf"))


@triton.jit
def _row(which, width, owners, temperatures, limits, peak, pieces, MASS: tl.constexpr):
    """Return whether the row is searched, its temperature, largest scaled logit, and limit (k, or p), float64."""
    owner = tl.load(owners + which)
    temperature = tl.load(temperatures + owner)
    piece = tl.arange(0, _PIECES)
    largest = tl.max(
        tl.load(peak + which * _PIECES + piece, mask=piece < pieces, other=-float("inf")), axis=0
    )
    active = (temperature > 0.0) & (temperature < float("inf"))
    active &= (largest < float("inf")) & (largest > -float("inf"))
    divisor = tl.where(active, temperature, 1.0)
    # Dividing keeps the order: the largest logit has the largest quotient.
    largest = tl.max(tl.div_rn(largest + tl.zeros((1,), tl.float32), divisor + tl.zeros((1,), tl.float32)))
    active &= (largest < float("inf")) & (largest > -float("inf"))
    limit = tl.load(limits + owner).to(tl.float64)
    if MASS:
        active &= limit < 1.0
    else:
        active &= (limit >= 1.0) & (limit < width)
    return active, divisor, largest, limit


@triton.jit(do_not_specialize=["pieces"])
def raise_floors(width, places, owners, temperatures, floors, peak, lowest, pieces):
    """Write min-p's threshold to `lowest`: the row's largest entry plus `floors` [N]."""
    which = tl.load(places + tl.program_id(0))
    active, _, largest, floor = _row(which, width, owners, temperatures, floors, peak, pieces, True)
    if active:
        tl.store(lowest + which, largest + floor.to(tl.float32))


@triton.jit
def _scaled(row, offset, width, divisor):
    """Scaled logits of a block, -inf behind the row's end."""
    x = tl.load(row + offset, mask=offset < width, other=-float("inf")).to(tl.float32)
    return tl.div_rn(x, divisor + tl.zeros_like(x))


@triton.jit
def _bucket(x, largest):
    """Bucket of the first level: the larger an entry, the lower or equal its bucket."""
    return tl.minimum((largest - x) * 0.5, 15.0).to(tl.int32)


@triton.jit
def _bucket_within(x, largest, coarse):
    """Bucket of the second level, for entries in bucket `coarse`."""
    return tl.minimum(tl.maximum(((largest - x) - 2.0 * coarse) * 8.0, 0.0), 15.0).to(tl.int32)


@triton.jit
def _target(state, limit, MASS: tl.constexpr):
    if MASS:
        return limit * tl.sum(tl.load(state + tl.arange(0, _BUCKETS)), axis=0).to(tl.float64)
    else:
        return limit


@triton.jit
def _reached(sums, base, target):
    """Return the first of 16 buckets with which the measure reaches the target, and the measure before it."""
    number = tl.arange(0, _BUCKETS)
    each = tl.load(sums + number)
    enough = (base + tl.cumsum(each, axis=0)).to(tl.float64) >= target
    found = tl.min(tl.where(enough, number, _BUCKETS - 1), axis=0)
    return found, base + tl.sum(tl.where(number < found, each, 0), axis=0)


@triton.jit(do_not_specialize=["blocks", "pieces"])
def bucket_sums(
    logits, stride, width, places, sources, owners, temperatures, limits, peak, lowest, state, blocks, pieces,
    MASS: tl.constexpr, LEVEL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the measures of a piece's entries to the row's buckets; entries below `lowest` do not count."""
    which = tl.load(places + tl.program_id(0))
    own_row = logits + tl.load(sources + tl.program_id(0)) * stride
    active, divisor, largest, limit = _row(which, width, owners, temperatures, limits, peak, pieces, MASS)
    if active:
        own = state + which * _STATE
        coarse = tl.full((), 0, tl.int32)
        if LEVEL == 1:
            coarse, _ = _reached(own, tl.full((), 0, tl.int64), _target(own, limit, MASS))
        floor = tl.load(lowest + which)
        begin = tl.program_id(1) * blocks * BLOCK
        number = tl.arange(0, _BUCKETS)
        sums = tl.zeros((_BUCKETS,), tl.int64)
        for start in tl.range(begin, tl.minimum(begin + blocks * BLOCK, width), BLOCK, num_stages=3):
            offset = start + tl.arange(0, BLOCK)
            x = _scaled(own_row, offset, width, divisor)
            counted = (offset < width) & (x >= floor)
            bucket = _bucket(x, largest)
            if LEVEL == 1:
                counted &= bucket == coarse
                bucket = _bucket_within(x, largest, coarse)
            if tl.max(counted.to(tl.int32), axis=0) > 0:
                measure = tl.where(counted, mass_of(x - largest), 0) if MASS else counted.to(tl.int64)
                sums += tl.sum(tl.where(bucket[None, :] == number[:, None], measure[None, :], 0), axis=1)
        tl.atomic_add(own + LEVEL * _BUCKETS + number, sums, mask=sums > 0, sem="relaxed")


@triton.jit
def _last_bucket(own, limit, MASS: tl.constexpr):
    """Return both buckets in which the target is reached, the measure before them, and the target."""
    target = _target(own, limit, MASS)
    coarse, base = _reached(own, tl.full((), 0, tl.int64), target)
    fine, base = _reached(own + _BUCKETS, base, target)
    return coarse, fine, base, target


@triton.jit
def _inside(x, offset, width, floor, largest, coarse, fine):
    """Return which entries lie in the last bucket."""
    there = (offset < width) & (x >= floor) & (_bucket(x, largest) == coarse)
    return there & (_bucket_within(x, largest, coarse) == fine)


@triton.jit(do_not_specialize=["blocks", "pieces"])
def collect(
    logits, stride, width, places, sources, owners, temperatures, limits, peak, lowest, state, keys, blocks, pieces,
    MASS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the keys of a piece's entries in the last bucket to `keys` [rows, CAPACITY], in any order."""
    which = tl.load(places + tl.program_id(0))
    own_row = logits + tl.load(sources + tl.program_id(0)) * stride
    active, divisor, largest, limit = _row(which, width, owners, temperatures, limits, peak, pieces, MASS)
    if active:
        own = state + which * _STATE
        coarse, fine, _, _ = _last_bucket(own, limit, MASS)
        floor = tl.load(lowest + which)
        begin = tl.program_id(1) * blocks * BLOCK
        for start in tl.range(begin, tl.minimum(begin + blocks * BLOCK, width), BLOCK, num_stages=3):
            offset = start + tl.arange(0, BLOCK)
            x = _scaled(own_row, offset, width, divisor)
            inside = _inside(x, offset, width, floor, largest, coarse, fine).to(tl.int32)
            count = tl.sum(inside, axis=0)
            if count > 0:
                slot = tl.atomic_add(own + _COLLECTED, count.to(tl.int64), sem="relaxed")
                slot += tl.cumsum(inside, axis=0) - 1
                key = order_key(x).to(tl.int32, bitcast=True)
                tl.store(keys + which * _CAPACITY + slot, key, mask=(inside > 0) & (slot < _CAPACITY))


@triton.jit(do_not_specialize=["pieces"])
def select(
    logits, stride, width, places, sources, owners, temperatures, limits, peak, lowest, state, keys, pieces,
    MASS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find the key of a row among those collected, and write its entry to `lowest`."""
    which = tl.load(places + tl.program_id(0))
    own_row = logits + tl.load(sources + tl.program_id(0)) * stride
    active, divisor, largest, limit = _row(which, width, owners, temperatures, limits, peak, pieces, MASS)
    if active:
        own = state + which * _STATE
        coarse, fine, base, target = _last_bucket(own, limit, MASS)
        floor = tl.load(lowest + which)
        count = tl.load(own + _COLLECTED)
        full = count > _CAPACITY
        end = tl.where(full, tl.cast(width, tl.int64), count)
        found = tl.zeros((), tl.int64)
        for digit in range(8):
            shift = 28 - 4 * digit
            pivots = found + (tl.arange(0, _BUCKETS).to(tl.int64) << shift)
            measures = tl.zeros((_BUCKETS,), tl.int64)
            for start in range(0, end, BLOCK):
                offset = start + tl.arange(0, BLOCK)
                if full:
                    x = _scaled(own_row, offset, width, divisor)
                    inside = _inside(x, offset, width, floor, largest, coarse, fine)
                    key = order_key(x)
                else:
                    inside = offset < end
                    key = tl.load(keys + which * _CAPACITY + offset, mask=inside, other=_KEY_OF_OFF)
                    key = key.to(tl.uint32, bitcast=True)
                mass = mass_of(of_order_key(key) - largest)
                measure = tl.where(inside, mass, 0) if MASS else inside.to(tl.int64)
                above = key.to(tl.int64)[None, :] >= pivots[:, None]
                measures += tl.sum(tl.where(above, measure[None, :], 0), axis=1)
            # Pivot 0 is known to reach the target; the digit is the number of other pivots that do.
            reached = ((base + measures).to(tl.float64) >= target) & (tl.arange(0, _BUCKETS) > 0)
            found += tl.sum(reached.to(tl.int64), axis=0) << shift
        # With p of 0 every key reaches the target, even NaN's; the largest entry must be kept, so keys are
        # compared, not floats. With fewer than k entries no key does, and min-p's threshold stays.
        found = tl.minimum(found, order_key(largest).to(tl.int64))
        tl.store(lowest + which, tl.where(found > 0, of_order_key(found.to(tl.uint32)), floor))
