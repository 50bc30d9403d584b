"""Put the pieces of each row together, and verify drafts: a program does one request.

A row's token is that of its best piece, the lowest of equals. A draft is accepted iff it is that token; behind the
first that is not, rows are UNSAMPLED (verify.py).
"""

# mypy: disable-error-code="no-untyped-def,import-untyped"
# Triton's functions carry types that annotations cannot say.

import triton
import triton.language as tl

from kernels.coupled_sampler.noise import MAX_POSITION
from kernels.coupled_sampler.reference import INVALID
from kernels.coupled_sampler.verify import UNSAMPLED

_INVALID, _UNSAMPLED = tl.constexpr(INVALID), tl.constexpr(UNSAMPLED)
_MAX_POSITION, _NO_TOKEN = tl.constexpr(MAX_POSITION), tl.constexpr(0x7FFFFFFF)


@triton.jit
def _log_of_sum(largest, total, place, mask):
    m = tl.load(largest + place, mask=mask, other=-float("inf"))
    s = tl.load(total + place, mask=mask, other=0.0)
    top = tl.max(m, axis=0)
    shift = tl.where(top > -float("inf"), top, 0.0)
    return top + tl.log(tl.sum(s * tl.exp(m - shift), axis=0))


@triton.jit
def finish(
    logits, stride, cu_rows, drafts, positions, temperatures,
    scores, tokens, bad, raw_largest, raw_total, largest, total,
    out_tokens, out_counts, out_raw, out_processed, pieces, PIECES: tl.constexpr,
):  # fmt: skip
    """Request `program_id(0)`: write its rows' tokens [R] int64 and log-probabilities [R], and its count [N]."""
    request = tl.program_id(0).to(tl.int64)
    first, end = tl.load(cu_rows + request), tl.load(cu_rows + request + 1)
    position, temperature = tl.load(positions + request), tl.load(temperatures + request)
    sound = (temperature >= 0.0) & (temperature < float("inf"))
    divisor = tl.where(temperature == 0.0, 1.0, temperature)
    piece = tl.arange(0, PIECES)
    mask = piece < pieces
    going = tl.full((), 1, tl.int32)
    count = tl.full((), 0, tl.int64)
    for row in range(first, end):
        place = row * pieces + piece
        score = tl.load(scores + place, mask=mask, other=-float("inf"))
        found = tl.load(tokens + place, mask=mask, other=_NO_TOKEN)
        best = tl.max(score, axis=0)
        token = tl.min(tl.where(score == best, found, _NO_TOKEN), axis=0).to(tl.int64)
        spoiled = tl.max(tl.load(bad + place, mask=mask, other=0), axis=0) > 0
        at = position + row - first
        valid = sound & (best > -float("inf")) & (spoiled == 0) & (at >= 0) & (at <= _MAX_POSITION)
        logit = tl.load(logits + row * stride + tl.where(valid, token, 0)).to(tl.float32)
        raw = logit - _log_of_sum(raw_largest, raw_total, place, mask)
        processed = logit / divisor - _log_of_sum(largest, total, place, mask)
        token = tl.where(valid, token, _INVALID)
        emitted = going > 0
        reported = emitted & valid
        tl.store(out_tokens + row, tl.where(emitted, token, _UNSAMPLED))
        tl.store(out_raw + row, tl.where(reported, raw, float("nan")))
        tl.store(out_processed + row, tl.where(reported, processed, float("nan")))
        count += going
        # The drafts of a request start as many entries before its rows as there are requests before it.
        draft = tl.load(drafts + row - request, mask=row + 1 < end, other=_UNSAMPLED)
        going = tl.where(emitted & valid & (token == draft), 1, 0)
    tl.store(out_counts + request, count)
