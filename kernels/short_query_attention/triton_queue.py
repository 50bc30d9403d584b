"""The queue that programs share (launch.py), as the kernels see it: the units of requests, and where one lies.

Units are `chunk` positions of a walk; a walk is one tile of a request's rows for one key-value head.
"""

# mypy: disable-error-code="no-untyped-def,import-untyped"
# Triton's functions carry types that annotations cannot say.

import triton
import triton.language as tl

_REQUESTS_AT_ONCE = tl.constexpr(128)


@triton.jit
def first_seen(length, queries, window, WINDOW: tl.constexpr):
    """Return the first position that any query token of a request sees."""
    if WINDOW:
        return tl.maximum(length - queries - window + 1, 0)
    else:
        return length * 0


@triton.jit
def units_of(
    lengths, cu_queries, request, requests, window,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Return the walks (tiles of all heads) and the chunks of requests; units are their product."""
    there = request < requests
    first = tl.load(cu_queries + request, mask=there, other=0)
    queries = (tl.load(cu_queries + request + 1, mask=there, other=0) - first).to(tl.int32)
    queries = tl.where(there, queries, 0)
    length = tl.load(lengths + request, mask=there, other=0).to(tl.int32)
    seen = tl.maximum(length - first_seen(length, queries, window, WINDOW), 1)
    tiles = tl.cdiv(queries * GROUP, TILE)
    return tiles * (HEADS // GROUP), tl.where(queries > 0, tl.cdiv(seen, CHUNK), 0)


@triton.jit
def units_before(
    lengths, cu_queries, requests, limit, window,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Return the units of requests below `limit`, int64."""
    lane = tl.arange(0, _REQUESTS_AT_ONCE)
    total = tl.zeros((_REQUESTS_AT_ONCE,), tl.int64)
    for start in range(0, limit, _REQUESTS_AT_ONCE):
        walks, chunks = units_of(
            lengths, cu_queries, start + lane, requests, window, HEADS, GROUP, WINDOW, TILE, CHUNK
        )
        total += tl.where(start + lane < limit, walks.to(tl.int64) * chunks, 0)
    return tl.sum(total, axis=0)


@triton.jit
def find_unit(
    lengths, cu_queries, requests, unit, window,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Return the request that a unit belongs to, and the units before that request, int64."""
    lane = tl.arange(0, _REQUESTS_AT_ONCE)
    found = tl.full((), 0, tl.int32)
    before = tl.full((), 0, tl.int64)
    total = tl.full((), 0, tl.int64)
    for start in range(0, requests, _REQUESTS_AT_ONCE):
        walks, chunks = units_of(
            lengths, cu_queries, start + lane, requests, window, HEADS, GROUP, WINDOW, TILE, CHUNK
        )
        units = walks.to(tl.int64) * chunks
        behind = total + tl.cumsum(units, axis=0)
        passed = (behind <= unit) & (start + lane < requests)
        found += tl.sum(passed.to(tl.int32), axis=0)
        before += tl.sum(tl.where(passed, units, 0), axis=0)
        total += tl.sum(units, axis=0)
    return found, before
