"""Put the pieces of each row together, and verify drafts: a program does one request.

A row's token is that of its best piece, the lowest of equals, or else its proposal, if that and all before it in
the request are accepted (proposals.py). A draft is accepted iff it is the row's token; behind the first that is
not, rows are UNSAMPLED (verify.py).
"""

# mypy: disable-error-code="no-untyped-def,import-untyped"
# Triton's functions carry types that annotations cannot say.

import triton
import triton.language as tl

from kernels.coupled_sampler.noise import MAX_POSITION
from kernels.coupled_sampler.reference import INVALID, MASS_BITS, UNSAMPLED

MOST_PIECES = 64
"""Most pieces of a row, and the distance of two rows in what the scan leaves."""

_INVALID, _UNSAMPLED = tl.constexpr(INVALID), tl.constexpr(UNSAMPLED)
_MAX_POSITION, _NO_TOKEN = tl.constexpr(MAX_POSITION), tl.constexpr(0x7FFFFFFF)


_REJECTED = tl.constexpr(1 << MASS_BITS)
_ROWS, _PIECES = tl.constexpr(16), tl.constexpr(MOST_PIECES)


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
    """Request `program_id(0)`: write its rows' tokens [R] int64 and log-probabilities [R], and its counts [N].

    Sixteen rows are taken at a time. Inputs of the scan are [rows, MOST_PIECES]; `logits` are the model's own.
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
