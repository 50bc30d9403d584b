"""The sampler in Triton: a scan of the logits by pieces of rows, a kernel that joins the pieces, the launches.

`sample_triton` computes thresholds where there are masks (triton_threshold.py), then launches `scan`, then
`finish`. Both must be launched with enable_fp_fusion=False (noise.py says why).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from kernels.coupled_sampler import triton_threshold as search
from kernels.coupled_sampler.noise import (
    ABSOLUTE_SLACK,
    CELLS_PER_UNIT,
    LOWEST_GAP,
    MAX_POSITION,
    RELATIVE_SLACK,
    UNREACHABLE,
    WORD_THRESHOLDS,
    Domain,
)
from kernels.coupled_sampler.reference import INVALID, MASS_BITS, UNSAMPLED
from kernels.coupled_sampler.triton_noise import gumbel_of, words_of
from kernels.coupled_sampler.triton_threshold import MOST_PIECES, mass_of
from kernels.tuning import Tuning, multiprocessors, tuning

# mypy: disable-error-code="no-untyped-def,import-untyped"
# Triton's functions carry types that annotations cannot say.


_CELLS, _CELLS_PER_UNIT = tl.constexpr(len(WORD_THRESHOLDS)), tl.constexpr(float(CELLS_PER_UNIT))
_LOWEST_GAP, _UNREACHABLE = tl.constexpr(LOWEST_GAP), tl.constexpr(UNREACHABLE)
# Twice the slack of the CPU, which computes the gap in float64.
_ABSOLUTE, _RELATIVE = tl.constexpr(2 * ABSOLUTE_SLACK), tl.constexpr(2 * RELATIVE_SLACK)
_NO_TOKEN = tl.constexpr(0x7FFFFFFF)
BY_RAW, RESIDUAL = 1, 2
"""Flags of a row: its proposal is judged by the model's own logits; its request is sampled with residual noise."""
_BY_RAW, _RESIDUAL = tl.constexpr(BY_RAW), tl.constexpr(RESIDUAL)
_RESIDUAL_DOMAIN = tl.constexpr(int(Domain.RESIDUAL))
_REJECTED = tl.constexpr(1 << MASS_BITS)
_INVALID, _UNSAMPLED = tl.constexpr(INVALID), tl.constexpr(UNSAMPLED)
_MAX_POSITION = tl.constexpr(MAX_POSITION)
_ROWS, _PIECES = tl.constexpr(16), tl.constexpr(MOST_PIECES)
MASKS = frozenset({"top_k", "top_p", "floors"})
"""Vectors of `sample_triton` that mask entries."""


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
def _most(a, b, c, d):
    return tl.maximum(tl.maximum(a, b), tl.maximum(c, d))


@triton.jit
def _first_of(wanted, a, b, c, d, offset):
    """Return the lowest token that has the score; lane i of a to d has offset[i] and the three behind it."""
    last = tl.where(d == wanted, offset + 3, _NO_TOKEN)
    last = tl.where(c == wanted, offset + 2, last)
    last = tl.where(b == wanted, offset + 1, last)
    return tl.min(tl.where(a == wanted, offset, last), axis=0)


@triton.jit
def _sum_up(largest, total, a, b, c, d):
    """Add to each lane's running sum of exp(value - largest); -inf entries add nothing, NaN and +inf leave NaN."""
    new = tl.maximum(largest, _most(a, b, c, d))
    shift = tl.where(new > -float("inf"), new, 0.0)
    four = (tl.exp(a - shift) + tl.exp(b - shift)) + (tl.exp(c - shift) + tl.exp(d - shift))
    return new, total * tl.exp(largest - shift) + four


@triton.jit
def _store_sum(largest, total, place, out_largest, out_total):
    """Combine the lanes' sums and store them."""
    top = tl.max(largest, axis=0)
    shift = tl.where(top > -float("inf"), top, 0.0)
    tl.store(out_largest + place, top)
    tl.store(out_total + place, tl.sum(total * tl.exp(largest - shift), axis=0))


@triton.jit
def _in_fours(x, BLOCK: tl.constexpr):
    """[BLOCK] -> four of [BLOCK / 4]: entries 4 i, 4 i + 1, 4 i + 2, 4 i + 3."""
    even, odd = tl.split(tl.reshape(x, (BLOCK // 4, 2, 2)))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def _odds_against(own, odds, proposed, a, b, c, d, offset):
    """Return by lane the masses of all entries but the proposed one, int64 (proposals.py)."""
    return (
        (_odds_of(own, odds, proposed, a, offset) + _odds_of(own, odds, proposed, b, offset + 1))
        + (_odds_of(own, odds, proposed, c, offset + 2) + _odds_of(own, odds, proposed, d, offset + 3))
    )  # fmt: skip


@triton.jit
def _odds_of(own, odds, proposed, x, offset):
    return tl.where(offset != proposed, mass_of(tl.minimum((x - own) + odds, 0.0)), 0)


@triton.jit
def _without(excluded, x, offset):
    return tl.where(offset != excluded, x, -float("inf"))


@triton.jit
def _quotient(value, divisor):
    """Divide scalars as specified; the instruction takes vectors."""
    nothing = tl.zeros((1,), tl.float32)
    return tl.max(tl.div_rn(value + nothing, divisor + nothing), axis=0)


@triton.jit(do_not_specialize=["blocks", "rows_stride"])
def scan(
    logits, stride, raw_logits, raw_stride, width, places, sources, owners, seeds, positions, temperatures,
    first_rows, thresholds, table, domain, proposed, log_odds, flags,
    scores, tokens, values, raw_largest, raw_total, largest, total, against, own_values, blocks, rows_stride,
    EDITED: tl.constexpr, MASKED: tl.constexpr, PROPOSED: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Scan piece `program_id(1)`, of `blocks` blocks, of row places[program_id(0)] of the step, for its best token.

    Noise is drawn where it could matter, as in cpu.py: a block whose gap to the best score so far no noise bridges
    costs its load and a maximum; one whose integers all stay below the word that the gap needs costs Philox, but no
    logarithm. Each lane keeps its own sums, so threads wait for each other only where a block decides whether noise
    is drawn. The masses against a row's proposal (proposals.py) are summed in the same pass. Only a few numbers a
    piece are written; `finish` puts the pieces together.

    The row is row sources[program_id(0)] of `logits`. If those are EDITED, the model's own are in `raw_logits`, by
    the row's number in the step. Outputs are [rows, rows_stride]. scores, tokens and values: the best score, the
    lowest token that has it, and its logit. raw_largest to total: maximum and sum of exp(entry - maximum) of the
    model's logits, a sum of NaN if one of them is NaN or +inf, and of the scaled ones that are kept. With PROPOSED:
    the masses against the row's proposal, and own_values [rows], its logit. EDITED and PROPOSED need MASKED.
    """
    which = tl.load(places + tl.program_id(0))
    # Counted in blocks, so that the compiler knows how loads are aligned.
    begin = tl.program_id(1) * blocks * BLOCK
    row = logits + tl.load(sources + tl.program_id(0)) * stride
    raw_row = raw_logits + which * raw_stride
    owner = tl.load(owners + which)
    seed = tl.load(seeds + owner).to(tl.uint64, bitcast=True)
    position = tl.load(positions + owner) + which - tl.load(first_rows + owner)
    temperature = tl.load(temperatures + owner)
    greedy = temperature == 0.0
    divisor = tl.where(greedy, 1.0, temperature)
    threshold = tl.full((), -float("inf"), tl.float32)
    if MASKED:
        threshold = tl.load(thresholds + which)
    best = tl.full((), -float("inf"), tl.float32)
    token = tl.full((), _NO_TOKEN, tl.int32)
    lanes = 4 * tl.arange(0, BLOCK // 4)
    nothing = tl.full((BLOCK // 4,), -float("inf"), tl.float32)
    by = divisor + tl.zeros((BLOCK // 4,), tl.float32)
    m_raw, s_raw = nothing, tl.zeros((BLOCK // 4,), tl.float32)
    m, s = nothing, s_raw
    if PROPOSED:
        flag = tl.load(flags + which)
        by_raw, by_kept, residual = (flag & _BY_RAW) != 0, (flag & _BY_RAW) == 0, (flag & _RESIDUAL) != 0
        wanted, odds = tl.load(proposed + which), tl.load(log_odds + which)
        place_of_own = tl.where(wanted < 0, 0, wanted)
        value_of_own = tl.load(row + place_of_own).to(tl.float32)
        own = _quotient(value_of_own, divisor)
        allowed = (wanted >= 0) & (own > -float("inf")) & (own >= threshold) & (odds < float("inf"))
        own = tl.where(by_raw, tl.load(raw_row + place_of_own).to(tl.float32), own)
        allowed = allowed & (own < float("inf"))
        # At temperature 0 a proposal is accepted iff it is the arg-max, which `finish` compares.
        weighed = allowed & (temperature != 0.0)
        excluded = tl.where(residual & (temperature != 0.0), wanted, -1)
        domain = tl.where(residual, _RESIDUAL_DOMAIN, tl.cast(domain, tl.int32))
        masses = tl.zeros((BLOCK // 4,), tl.int64)
    for start in tl.range(begin, tl.minimum(begin + blocks * BLOCK, width), BLOCK, num_stages=STAGES):
        offset = start + tl.arange(0, BLOCK)
        x = tl.load(row + offset, mask=offset < width, other=-float("inf")).to(tl.float32)
        x0, x1, x2, x3 = _in_fours(x, BLOCK)
        if EDITED:
            r = tl.load(raw_row + offset, mask=offset < width, other=-float("inf")).to(tl.float32)
            r0, r1, r2, r3 = _in_fours(r, BLOCK)
            m_raw, s_raw = _sum_up(m_raw, s_raw, r0, r1, r2, r3)
        else:
            r0, r1, r2, r3 = x0, x1, x2, x3
            m_raw, s_raw = _sum_up(m_raw, s_raw, x0, x1, x2, x3)
        # Not one condition: PROPOSED is a compile-time constant, and without it by_raw is undefined.
        if PROPOSED:  # noqa: SIM102
            if by_raw & weighed:
                masses += _odds_against(own, odds, wanted, r0, r1, r2, r3, start + lanes)
        top = tl.max(_most(x0, x1, x2, x3), axis=0)
        bound = _quotient(top, divisor)
        # A block without a kept entry adds nothing. (NaN is in the raw sums already.)
        if bound >= threshold:
            if MASKED:
                x0, x1, x2, x3 = tl.div_rn(x0, by), tl.div_rn(x1, by), tl.div_rn(x2, by), tl.div_rn(x3, by)
                x0 = tl.where(x0 >= threshold, x0, -float("inf"))
                x1 = tl.where(x1 >= threshold, x1, -float("inf"))
                x2 = tl.where(x2 >= threshold, x2, -float("inf"))
                x3 = tl.where(x3 >= threshold, x3, -float("inf"))
                m, s = _sum_up(m, s, x0, x1, x2, x3)
            else:
                # Precise enough for a sum; scores are divided as specified. At 1 it is the sum of the logits.
                if divisor != 1.0:
                    near = 1.0 / divisor
                    m, s = _sum_up(m, s, x0 * near, x1 * near, x2 * near, x3 * near)
            if PROPOSED:
                if by_kept & weighed:
                    masses += _odds_against(own, odds, wanted, x0, x1, x2, x3, start + lanes)
                x0, x1 = _without(excluded, x0, start + lanes), _without(excluded, x1, start + lanes + 1)
                x2, x3 = _without(excluded, x2, start + lanes + 2), _without(excluded, x3, start + lanes + 3)
            if greedy:
                if top > best:
                    best = top
                    token = _first_of(top, x0, x1, x2, x3, start + lanes)
            else:
                needed = _word_needed(best, bound, table)
                if needed < _UNREACHABLE:
                    w0, w1, w2, w3 = words_of(seed, position, domain, start, BLOCK, WIDE)
                    if tl.max(_most(w0, w1, w2, w3), axis=0) >= needed.to(tl.uint32):
                        if not MASKED:
                            x0, x1, x2, x3 = (
                                tl.div_rn(x0, by),
                                tl.div_rn(x1, by),
                                tl.div_rn(x2, by),
                                tl.div_rn(x3, by),
                            )
                        # Noise is finite: -inf stays -inf.
                        x0, x1 = x0 + gumbel_of(w0), x1 + gumbel_of(w1)
                        x2, x3 = x2 + gumbel_of(w2), x3 + gumbel_of(w3)
                        winner = tl.max(_most(x0, x1, x2, x3), axis=0)
                        if winner > best:
                            best = winner
                            token = _first_of(winner, x0, x1, x2, x3, start + lanes)
    place = which * rows_stride + tl.program_id(1)
    tl.store(scores + place, best)
    tl.store(tokens + place, token)
    tl.store(values + place, tl.load(row + tl.where(token == _NO_TOKEN, 0, token)).to(tl.float32))
    if not MASKED:
        same = divisor == 1.0
        m, s = tl.where(same, m_raw, m), tl.where(same, s_raw, s)
    _store_sum(m_raw, s_raw, place, raw_largest, raw_total)
    _store_sum(m, s, place, largest, total)
    if PROPOSED:
        tl.store(against + place, tl.sum(masses, axis=0) + tl.where(allowed, 0, _REJECTED))
        tl.store(own_values + which, value_of_own)


@triton.jit
def _log_of_sum(largest, total, place, mask):
    """Return log of sum exp of rows whose pieces lie along axis 1; NaN where one of their sums is."""
    m = tl.load(largest + place, mask=mask, other=-float("inf"))
    s = tl.load(total + place, mask=mask, other=0.0)
    top = tl.max(m, axis=1)
    shift = tl.where(top > -float("inf"), top, 0.0)
    return top + tl.log(tl.sum(s * tl.exp(m - shift[:, None]), axis=1))


@triton.jit(do_not_specialize=["pieces"])
def finish(
    logits, stride, cu_rows, drafts, positions, temperatures, proposed,
    scores, tokens, values, raw_largest, raw_total, largest, total, against, own_values,
    out_tokens, out_counts, out_reused, out_raw, out_processed, pieces,
    PROPOSED: tl.constexpr,
):  # fmt: skip
    """Put the pieces of the rows of request `program_id(0)` together, and verify its drafts.

    A row's token is the token of its best piece, the lowest of equals, or else its proposal, if it and all earlier
    proposals of the request are accepted (proposals.py). A draft is accepted iff it is the row's token; behind the
    first mismatch rows are UNSAMPLED (`reference.verify`). Writes the rows' tokens [R] int64 and log-probabilities
    [R], and the request's counts [N].

    Sixteen rows are processed at a time. Inputs of the scan are [rows, MOST_PIECES]; `logits` are the model's own.
    """
    request = tl.program_id(0).to(tl.int64)
    first, end = tl.load(cu_rows + request), tl.load(cu_rows + request + 1)
    position, temperature = tl.load(positions + request), tl.load(temperatures + request)
    divisor = tl.where(temperature == 0.0, 1.0, temperature)
    piece = tl.arange(0, _PIECES)
    lane = tl.arange(0, _ROWS)
    # A vector like what it is combined with: the interpreter mistakes the type of one that is not.
    heat = temperature + tl.zeros((_ROWS,), tl.float32)
    sound = (heat >= 0.0) & (heat < float("inf"))
    going, proposing = tl.full((), 1, tl.int32), tl.full((), 1, tl.int32)
    count, reused = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    for start in range(first, end, _ROWS):
        row = start + lane
        here = row < end
        place = row[:, None] * _PIECES + piece[None, :]
        mask = here[:, None] & (piece < pieces)[None, :]
        score = tl.load(scores + place, mask=mask, other=-float("inf"))
        found = tl.load(tokens + place, mask=mask, other=_NO_TOKEN)
        best = tl.max(score, axis=1)
        token = tl.min(tl.where(score == best[:, None], found, _NO_TOKEN), axis=1).to(tl.int64)
        value = tl.load(values + place, mask=mask, other=0.0)
        value = tl.max(tl.where(found == token[:, None], value, -float("inf")), axis=1)
        raw_sum = _log_of_sum(raw_largest, raw_total, place, mask)
        at = position + row - first
        sound_row = sound & (raw_sum == raw_sum) & (at >= 0) & (at <= _MAX_POSITION)
        valid = sound_row & (best > -float("inf"))
        if PROPOSED:
            wanted = tl.load(proposed + row, mask=here, other=-1)
            odds = tl.sum(tl.load(against + place, mask=mask, other=0), axis=1)
            accepted = here & sound_row & (wanted >= 0) & (odds < _REJECTED)
            accepted &= (heat > 0.0) | (token == wanted)
            lead = tl.min(tl.where(accepted, _ROWS, lane), axis=0)
            taken = accepted & (lane < lead) & (proposing > 0)
            proposing = tl.where((proposing > 0) & (lead == _ROWS), 1, 0)
            token = tl.where(taken, wanted, token)
            value = tl.where(taken, tl.load(own_values + row, mask=here, other=0.0), value)
            valid = valid | taken
        logit = tl.load(logits + row * stride + tl.where(valid, token, 0), mask=here, other=0.0).to(
            tl.float32
        )
        processed = value / divisor - _log_of_sum(largest, total, place, mask)
        token = tl.where(valid, token, _INVALID)
        # The drafts of a request start as many entries before its rows as there are requests before it.
        draft = tl.load(drafts + row - request, mask=row + 1 < end, other=_UNSAMPLED)
        stops = tl.min(tl.where(valid & (token == draft), _ROWS, lane), axis=0)
        emitted = here & (going > 0) & (lane <= stops)
        reported = emitted & valid
        tl.store(out_tokens + row, tl.where(emitted, token, _UNSAMPLED), mask=here)
        tl.store(out_raw + row, tl.where(reported, logit - raw_sum, float("nan")), mask=here)
        tl.store(out_processed + row, tl.where(reported, processed, float("nan")), mask=here)
        count += tl.sum(emitted.to(tl.int64), axis=0)
        if PROPOSED:
            reused += tl.sum((taken & emitted).to(tl.int64), axis=0)
        going = tl.where((going > 0) & (stops == _ROWS), 1, 0)
    tl.store(out_counts + request, count)
    tl.store(out_reused + request, reused)


class LogitPart(NamedTuple):
    """Rows of a step that lie in one tensor: their numbers in the step, and their rows in the tensor, int64."""

    logits: torch.Tensor
    places: torch.Tensor
    sources: torch.Tensor


def sample_triton(
    logits: torch.Tensor,
    vectors: dict[str, torch.Tensor],
    parts: Sequence[LogitPart],
    out: dict[str, torch.Tensor],
    domain: Domain,
) -> torch.Tensor | None:
    """Write `out`, as sample.Sampled has it; arguments checked by its `sample`, all on the device of the logits.

    `vectors`: seeds, positions, temperature, drafts, first_rows [N + 1], owners [R]; with masks top_k, top_p
    and floors [N]; with proposals proposed, log_odds and flags [R]; each contiguous. The parts
    have every row once; a part whose tensor is not `logits` is edited. Returns the rows' thresholds
    [R], if there are masks.
    """
    rows, width = logits.shape
    if rows == 0:
        return None
    chosen, device = tuning(logits.device), logits.device
    owners, temperature, first_rows = vectors["owners"], vectors["temperature"], vectors["first_rows"]
    masked, proposing = not MASKS.isdisjoint(vectors), "proposed" in vectors
    lowest = torch.empty(rows, dtype=torch.float32, device=device)
    if masked:
        thresholds(parts, vectors, lowest)
    elif proposing or any(part.logits is not logits for part in parts):
        # A plain scan does not read them.
        lowest.fill_(-torch.inf)
    proposed, odds, flags = (vectors.get(name, owners) for name in ("proposed", "log_odds", "flags"))
    blocks, pieces = pieces_of(rows, width, chosen.scan_block, chosen.scan_programs, device)
    # Rows are MOST_PIECES apart, however many pieces there are: a kernel is compiled for every alignment.
    best, values, *sums = torch.empty(6, rows, MOST_PIECES, dtype=torch.float32, device=device)
    found = torch.empty(rows, MOST_PIECES, dtype=torch.int32, device=device)
    against = torch.empty(rows if proposing else 1, MOST_PIECES, dtype=torch.int64, device=device)
    own = torch.empty(rows, dtype=torch.float32, device=device)
    for part in parts:
        edited = part.logits is not logits
        scan[(len(part.places), pieces)](
            part.logits, part.logits.stride(0), logits, logits.stride(0), width, part.places, part.sources, owners,
            vectors["seeds"], vectors["positions"], temperature, first_rows, lowest, _word_table(device),
            int(domain), proposed, odds, flags, best, found, values, *sums, against, own, blocks, MOST_PIECES,
            EDITED=edited, MASKED=masked or edited or proposing, PROPOSED=proposing, BLOCK=chosen.scan_block,
            STAGES=chosen.scan_stages, WIDE=chosen.wide_products, num_warps=chosen.scan_warps,
            enable_fp_fusion=False,
        )  # fmt: skip
    finish[(len(first_rows) - 1,)](
        logits, logits.stride(0), first_rows, vectors["drafts"], vectors["positions"], temperature, proposed,
        best, found, values, *sums, against, own,
        out["tokens"], out["counts"], out["reused"], out["logprobs"], out["processed"], pieces,
        PROPOSED=proposing, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return lowest if masked else None


def thresholds(parts: Sequence[LogitPart], vectors: dict[str, torch.Tensor], lowest: torch.Tensor) -> None:
    """Write the threshold of each row to `lowest` [R]: -inf for a row that is greedy, unmasked or not valid.

    `vectors`: owners [R] and temperature [N], and of top_k, top_p and floors [N] those that there are.
    """
    device, rows = lowest.device, len(lowest)
    chosen: Tuning = tuning(device)
    width = parts[0].logits.shape[1]
    blocks, pieces = pieces_of(rows, width, chosen.search_block, chosen.search_programs, device)
    options: dict[str, Any] = {"num_warps": chosen.search_warps, "enable_fp_fusion": False}
    options["BLOCK"] = chosen.search_block
    peak = torch.empty(rows, MOST_PIECES, dtype=torch.float32, device=device)
    keys = torch.empty(rows, search.CAPACITY, dtype=torch.int32, device=device)
    state = torch.zeros(2, rows, search.STATE, dtype=torch.int64, device=device)
    owned = (vectors["owners"], vectors["temperature"])
    for part in parts:
        row = (part.logits, part.logits.stride(0), width, part.places, part.sources)
        grid = (len(part.places), pieces)
        search.peaks[grid](*row, peak, lowest, blocks, **options)
        if "floors" in vectors:
            search.raise_floors[grid[:1]](
                width, part.places, *owned, vectors["floors"], peak, lowest, pieces, enable_fp_fusion=False
            )
        # Top-p is of what top-k keeps.
        for name, own, mass in (("top_k", state[0], False), ("top_p", state[1], True)):
            if name not in vectors:
                continue
            shared = (*row, *owned, vectors[name], peak, lowest, own)
            for level in (0, 1):
                search.bucket_sums[grid](*shared, blocks, pieces, MASS=mass, LEVEL=level, **options)
            search.collect[grid](*shared, keys, blocks, pieces, MASS=mass, **options)
            search.select[grid[:1]](*shared, keys, pieces, MASS=mass, **options)


def pieces_of(rows: int, width: int, block: int, programs: int, device: torch.device) -> tuple[int, int]:
    """Return the blocks of a piece and the pieces of a row, for `programs` programs on each multiprocessor."""
    blocks = triton.cdiv(width, block)
    wanted = max(1, min(MOST_PIECES, blocks, programs * multiprocessors(device) // rows))
    each = triton.cdiv(blocks, wanted)
    return each, triton.cdiv(blocks, each)


@cache
def _word_table(device: torch.device) -> torch.Tensor:
    """Return noise.WORD_THRESHOLDS on a device."""
    return torch.from_numpy(WORD_THRESHOLDS.astype(np.int64)).to(device)
