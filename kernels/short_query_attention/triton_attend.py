"""Short-query attention in Triton: the queue of units that programs share, attention, and the sum of parts.

The queue is described in inputs.py. Units are `chunk` positions of a walk; a walk is one tile of a request's rows
for one key-value head. A row is a query token with one of the `group` query heads of a key-value head, so a tile of
16 holds a decoding request of 16 heads a group as well as four query tokens of 4. A program that walks all of a
request's positions for a tile writes the result; programs that share a walk each write a part, and a second kernel
sums the parts in a fixed order.

Nothing here waits for the device or reads a value from it, so that launches can be captured in a CUDA graph; the
number of compilations depends on the model and on the size of the tile, not on the batch.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from kernels.short_query_attention.inputs import AttentionStep, Scratch, programs_for, tile_rows
from kernels.triton_math import dot, narrow
from kernels.tuning import tuning

# mypy: disable-error-code="no-untyped-def,import-untyped"
# Triton's functions carry types that annotations cannot say.


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


_LOG2E = tl.constexpr(1.4426950408889634)
_OF_THE_BATCH = ["window", "requests", "programs"]
"""Integers on which no kernel is specialised (1, or multiples of 16)."""
_OF_THE_CACHE = ["table_width", "num_blocks"]
"""Further ones: vLLM measures its memory with a small cache, and serves with another one."""
_ROWS_SUMMED = 4
"""Rows of a tile that a program of the second kernel sums up."""
_PARTS_AT_ONCE = tl.constexpr(16)


def attend_triton(
    step: AttentionStep, *, out: torch.Tensor | None = None, scratch: Scratch | None = None
) -> torch.Tensor:
    """Compute `attend`; the caller checks the inputs.

    out      where the result goes, [T, Hq, D], contiguous and of the query's dtype. Rows of query tokens that
             belong to no request stay as they are. None: new memory
    scratch  room for the programs' parts (see `Scratch.rows_for`); a launch then takes no memory. None: new memory
    """
    tokens, heads, size = step.query.shape
    device = step.query.device
    if out is None:
        out = torch.empty_like(step.query, memory_format=torch.contiguous_format)
    requests, kv_heads = len(step.lengths), step.keys.shape[2]
    if tokens == 0 or requests == 0:
        return out
    chosen = tuning(device)
    tile = tile_rows(step.longest_query, step.group, chosen.attention_tile)
    wide = triton.next_power_of_2(size)
    # As many bytes at once, whatever an element has.
    across = max(16, chosen.attention_across * 256 // max(256, wide * step.query.element_size()))
    programs = programs_for(device, chosen)
    if scratch is None:
        scratch = Scratch.of(2 * programs * tile, size, device)
    programs = max(1, min(programs, scratch.rows // (2 * tile)))
    tree = step.tree if step.tree is not None else step.lengths
    shape = {
        "HEADS": heads, "GROUP": step.group, "WINDOW": step.window is not None, "TILE": tile, "SIZE": size,
        "WIDE": wide, "CHUNK": max(chosen.attention_chunk, across),
    }  # fmt: skip
    _attend[(programs,)](
        step.query, step.keys, step.values, step.block_table, step.lengths, step.cu_queries, tree,
        out, scratch.parts, scratch.peaks, scratch.sums, step.scale, step.window or 0, requests, programs,
        step.query.stride(0), step.query.stride(1), *step.keys.stride()[:3], *step.values.stride()[:3],
        step.block_table.stride(0), step.block_table.shape[1], step.keys.shape[0],
        **shape, BLOCK=step.keys.shape[1], TREE=step.tree is not None, ACROSS=across,
        STAGES=chosen.attention_stages,
        # Four warps have no registers for more than 32 rows.
        num_warps=chosen.attention_warps * (2 if tile > 32 else 1), enable_fp_fusion=True,
    )  # fmt: skip
    tiles = triton.cdiv(step.longest_query * step.group, tile)
    _sum_parts[(requests, kv_heads * tiles, triton.cdiv(tile, _ROWS_SUMMED))](
        scratch.parts, scratch.peaks, scratch.sums, step.lengths, step.cu_queries, out,
        step.window or 0, requests, programs, **shape, ROWS=_ROWS_SUMMED, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return out


def prepare(step: AttentionStep, longest_query: int, scratch: Scratch) -> None:
    """Compile every kernel that steps like this one can need, up to `longest_query` query tokens a request.

    Without it the first step of each kind waits for the compiler, for about a second. Launches on a request without
    positions; nothing is read or written.
    """
    device = step.query.device
    nothing = replace(
        step,
        query=step.query[:1],
        block_table=step.block_table[:1],
        lengths=torch.zeros(1, dtype=step.lengths.dtype, device=device),
        cu_queries=torch.zeros(2, dtype=step.cu_queries.dtype, device=device),
    )
    out = torch.empty_like(nothing.query, memory_format=torch.contiguous_format)
    largest = tuning(device).attention_tile
    by_tile = {tile_rows(longest, step.group, largest): longest for longest in range(1, longest_query + 1)}
    for longest in by_tile.values():
        attend_triton(replace(nothing, longest_query=longest), out=out, scratch=scratch)


@triton.jit(do_not_specialize=_OF_THE_BATCH + _OF_THE_CACHE)
def _attend(
    query, keys, values, block_table, lengths, cu_queries, tree, out, parts, peaks, sums,
    scale, window, requests, programs,
    query_stride, query_head_stride, key_block, key_token, key_head, value_block, value_token, value_head,
    table_stride, table_width, num_blocks,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr, SIZE: tl.constexpr,
    WIDE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, TREE: tl.constexpr, ACROSS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    total = units_before(lengths, cu_queries, requests, requests, window, HEADS, GROUP, WINDOW, TILE, CHUNK)
    unit, last = program * total // programs, (program + 1) * total // programs
    column = tl.arange(0, WIDE)
    inside = column < SIZE
    line = tl.arange(0, TILE)
    if unit < last:
        request, before = find_unit(
            lengths, cu_queries, requests, unit, window, HEADS, GROUP, WINDOW, TILE, CHUNK
        )
        while unit < last:
            walks, chunks = units_of(
                lengths, cu_queries, request, requests, window, HEADS, GROUP, WINDOW, TILE, CHUNK
            )
            # Requests without units are skipped.
            if unit - before >= walks.to(tl.int64) * chunks:
                before += walks.to(tl.int64) * chunks
                request += 1
            else:
                walk, chunk = (
                    ((unit - before) // chunks).to(tl.int32),
                    ((unit - before) % chunks).to(tl.int32),
                )
                taken = tl.minimum(chunks - chunk, last - unit).to(tl.int32)
                first = tl.load(cu_queries + request).to(tl.int64)
                queries = (tl.load(cu_queries + request + 1) - first).to(tl.int32)
                length = tl.load(lengths + request).to(tl.int32)
                tiles = tl.cdiv(queries * GROUP, TILE)
                kv_head, row = (walk // tiles).to(tl.int64), (walk % tiles) * TILE + line
                begin = first_seen(length, queries, window, WINDOW) + chunk * CHUNK
                end = tl.minimum(begin + taken * CHUNK, length)
                there = row < queries * GROUP
                token = first + row // GROUP
                head = kv_head * GROUP + row % GROUP
                q = tl.load(
                    query + (token * query_stride + head * query_head_stride)[:, None] + column[None, :],
                    mask=there[:, None] & inside[None, :],
                    other=0.0,
                )
                start = length - queries
                own = start + row // GROUP
                if TREE:
                    seen = tl.load(tree + token, mask=there, other=0)
                table = block_table + tl.cast(request, tl.int64) * table_stride
                peak = tl.full((TILE,), -float("inf"), tl.float32)
                share = tl.zeros((TILE,), tl.float32)
                acc = tl.zeros((TILE, WIDE), tl.float32)
                for at in tl.range(begin, end, ACROSS, num_stages=STAGES):
                    position = at + tl.arange(0, ACROSS)
                    entry = position // BLOCK
                    known = (position < end) & (entry < table_width)
                    block = tl.load(table + entry, mask=known, other=0).to(tl.int64)
                    known &= (block >= 0) & (block < num_blocks)
                    slot = (position % BLOCK).to(tl.int64)
                    k = tl.load(
                        keys + (block * key_block + slot * key_token + kv_head * key_head)[None, :]
                        + column[:, None],
                        mask=known[None, :] & inside[:, None],
                        other=0.0,
                    )  # fmt: skip
                    scores = dot(q, k) * (scale * _LOG2E)
                    if TREE:
                        bit = tl.maximum(position - start, 0)
                        visible = (position < start)[None, :] | (((seen[:, None] >> bit[None, :]) & 1) > 0)
                    else:
                        visible = position[None, :] <= own[:, None]
                        if WINDOW:
                            visible &= position[None, :] > own[:, None] - window
                    visible &= known[None, :] & there[:, None]
                    scores = tl.where(visible, scores, -float("inf"))
                    higher = tl.maximum(peak, tl.max(scores, axis=1))
                    base = tl.where(higher > -float("inf"), higher, 0.0)
                    weights = tl.exp2(scores - base[:, None])
                    fade = tl.exp2(peak - base)
                    v = tl.load(
                        values + (block * value_block + slot * value_token + kv_head * value_head)[:, None]
                        + column[None, :],
                        mask=known[:, None] & inside[None, :],
                        other=0.0,
                    )  # fmt: skip
                    acc = acc * fade[:, None] + dot(narrow(weights, v.dtype), v)
                    share = share * fade + tl.sum(weights, axis=1)
                    peak = higher
                if taken == chunks:
                    acc = acc / tl.where(share > 0.0, share, 1.0)[:, None]
                    place = token * HEADS + head
                    keep = there[:, None] & inside[None, :]
                    tl.store(
                        out + place[:, None] * SIZE + column[None, :],
                        narrow(acc, out.dtype.element_ty),
                        mask=keep,
                    )
                else:
                    # The first part belongs to a walk that another program began, the second to one that another
                    # ends.
                    place = (2 * program + tl.where(chunk == 0, 1, 0)) * TILE + line
                    tl.store(peaks + place, peak)
                    tl.store(sums + place, share)
                    tl.store(parts + place[:, None] * SIZE + column[None, :], acc, mask=inside[None, :])
                unit += taken


@triton.jit(do_not_specialize=_OF_THE_BATCH)
def _sum_parts(
    parts, peaks, sums, lengths, cu_queries, out, window, requests, programs,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr, SIZE: tl.constexpr,
    WIDE: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Sum the parts that several programs wrote for `ROWS` rows of a request, a head and a tile."""
    request = tl.program_id(0)
    walks, chunks = units_of(
        lengths, cu_queries, request, requests, window, HEADS, GROUP, WINDOW, TILE, CHUNK
    )
    walk = tl.program_id(1)
    first = tl.load(cu_queries + request).to(tl.int64)
    queries = (tl.load(cu_queries + request + 1) - first).to(tl.int32)
    tiles = tl.maximum(tl.cdiv(queries * GROUP, TILE), 1)
    row = (walk % tiles) * TILE + tl.program_id(2) * ROWS
    if (walk < walks) & (row < queries * GROUP):
        total = units_before(
            lengths, cu_queries, requests, requests, window, HEADS, GROUP, WINDOW, TILE, CHUNK
        )
        unit = units_before(lengths, cu_queries, requests, request, window, HEADS, GROUP, WINDOW, TILE, CHUNK)
        unit += walk.to(tl.int64) * chunks
        # The programs of the first and of the last of these units: a program begins at program * total // programs.
        low = ((unit + 1) * programs - 1) // total
        high = ((unit + chunks) * programs - 1) // total
        if high > low:
            column = tl.arange(0, WIDE)
            inside = column < SIZE
            lane = tl.arange(0, _PARTS_AT_ONCE)
            for one in tl.static_range(ROWS):
                line = tl.program_id(2) * ROWS + one
                peak = tl.full((), -float("inf"), tl.float32)
                share = tl.full((), 0.0, tl.float32)
                acc = tl.zeros((WIDE,), tl.float32)
                for start in range(low, high + 1, _PARTS_AT_ONCE):
                    part = start + lane
                    there = part <= high
                    place = (2 * part + tl.where(part == low, 1, 0)) * TILE + line
                    # With fewer units than programs, programs without a unit have written nothing.
                    there &= part * total // programs < (part + 1) * total // programs
                    peak_of = tl.load(peaks + place, mask=there, other=-float("inf"))
                    higher = tl.maximum(peak, tl.max(peak_of, axis=0))
                    base = tl.where(higher > -float("inf"), higher, 0.0)
                    scale = tl.exp2(peak_of - base)
                    fade = tl.exp2(peak - base)
                    share = share * fade + tl.sum(
                        tl.load(sums + place, mask=there, other=0.0) * scale, axis=0
                    )
                    each = tl.load(
                        parts + place[:, None] * SIZE + column[None, :],
                        mask=there[:, None] & inside[None, :],
                        other=0.0,
                    )
                    acc = acc * fade + tl.sum(each * scale[:, None], axis=0)
                    peak = higher
                own = row + one
                head = (walk // tiles).to(tl.int64) * GROUP + own % GROUP
                target = (first + own // GROUP) * HEADS + head
                acc = acc / tl.where(share > 0.0, share, 1.0)
                tl.store(
                    out + target * SIZE + column, narrow(acc, out.dtype.element_ty),
                    mask=inside & (own + 0 * column < queries * GROUP),
                )  # fmt: skip
