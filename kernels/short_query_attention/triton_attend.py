"""Short-query attention in Triton.

A program takes one request, one key-value head, one tile of rows and one piece of the context. A row is a query
token with one of the head's `group` query heads, so a tile of 16 holds a decoding request of 16 heads a group as
well as four query tokens of 4. Every request has as many pieces, unless they would be too short; more than one are
summed up by a second kernel, in a fixed order.

Nothing here waits for the device or reads a value from it, so that launches can be captured in a CUDA graph; how
often a kernel is compiled depends on the model and on the size of the tile, not on the batch.
"""

# mypy: disable-error-code="no-untyped-def,import-untyped"
# Triton's functions carry types that annotations cannot say.

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from kernels.short_query_attention.inputs import AttentionStep
from kernels.short_query_attention.launch import (
    LEAST_PIECE,
    MOST_PIECES,
    PROGRAMS_WANTED,
    Scratch,
    cut,
    tile_rows,
)
from kernels.triton_math import dot, narrow

_LOG2E = tl.constexpr(1.4426950408889634)
_OF_THE_BATCH = ["window", "pieces", "least", "tiles", "tokens"]
"""Integers that no kernel is compiled anew for when they happen to be 1, or multiples of 16."""


def attend_triton(
    step: AttentionStep,
    programs_wanted: int = PROGRAMS_WANTED,
    least_piece: int = LEAST_PIECE,
    *,
    out: torch.Tensor | None = None,
    scratch: Scratch | None = None,
) -> torch.Tensor:
    """`attend`; inputs checked by the caller.

    out      where the result goes, [T, Hq, D], contiguous and of the query's dtype. Rows of query tokens that
             belong to no request stay as they are. None: new memory
    scratch  room for the pieces' results (see `Scratch.rows_for`); a launch then takes no memory. None: new memory
    """
    tokens, heads, size = step.query.shape
    if out is None:
        out = torch.empty_like(step.query, memory_format=torch.contiguous_format)
    requests, kv_heads = len(step.lengths), step.keys.shape[2]
    if tokens == 0 or requests == 0:
        return out
    wide = triton.next_power_of_2(size)
    across = 32 if wide * step.query.element_size() > 256 else 64
    reach = step.longest if step.window is None else min(step.longest, step.window + step.longest_query - 1)
    made = cut(requests, kv_heads, step.longest_query, step.group, reach, programs_wanted, least_piece)
    pieces = made.pieces
    if scratch is not None:
        pieces = max(1, min(pieces, scratch.rows // (tokens * heads)))
    if pieces == 1:
        # The output stands in for what is not used.
        parts = peaks = sums = out
    else:
        scratch = scratch or Scratch.of(pieces * tokens * heads, size, out.device)
        parts, peaks, sums = scratch.parts, scratch.peaks, scratch.sums
    tree = step.tree if step.tree is not None else step.lengths
    _attend[(requests, kv_heads, made.tiles * pieces)](
        step.query, step.keys, step.values, step.block_table, step.lengths, step.cu_queries, tree,
        parts, peaks, sums, step.scale, step.window or 0, pieces, least_piece, made.tiles,
        step.query.stride(0), step.query.stride(1), *step.keys.stride()[:3], *step.values.stride()[:3],
        step.block_table.stride(0), step.block_table.shape[1], step.keys.shape[0], tokens,
        BLOCK=step.keys.shape[1], SIZE=size, HEADS=heads, GROUP=step.group,
        WINDOW=step.window is not None, TREE=step.tree is not None, SPLIT=pieces > 1,
        TILE=made.tile, WIDE=wide, ACROSS=across,
        num_warps=4 if made.tile <= 64 else 8, num_stages=2, enable_fp_fusion=True,
    )  # fmt: skip
    if pieces > 1:
        _sum_pieces[(requests, step.longest_query, heads)](
            parts, peaks, sums, step.lengths, step.cu_queries, out, step.window or 0, pieces, least_piece, tokens,
            SIZE=size, HEADS=heads, WINDOW=step.window is not None,
            WIDE=wide, ACROSS=across, PIECES=triton.next_power_of_2(max(MOST_PIECES, pieces)),
            num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
    return out


def prepare(step: AttentionStep, longest_query: int, scratch: Scratch) -> None:
    """Have every kernel compiled that steps like this one can need, up to `longest_query` query tokens a request.

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
        longest=2 * LEAST_PIECE,
        window=None if step.window is None else 2 * LEAST_PIECE,
    )
    out = torch.empty_like(nothing.query, memory_format=torch.contiguous_format)
    by_tile = {tile_rows(longest, step.group): longest for longest in range(1, longest_query + 1)}
    for longest in by_tile.values():
        made = replace(nothing, longest_query=longest)
        for programs in (1, 1 << 20):
            attend_triton(made, programs, out=out, scratch=scratch)


@triton.jit
def _begin(length, queries, window, WINDOW: tl.constexpr):
    """Return the first position that any query token of a request sees."""
    if WINDOW:
        return tl.maximum(length - queries - window + 1, 0)
    else:
        return length * 0


@triton.jit
def _piece(reach, pieces, least, ACROSS: tl.constexpr):
    """Positions of a piece of a context of which `reach` are seen: a multiple of ACROSS."""
    return tl.cdiv(tl.maximum(tl.cdiv(reach, pieces), least), ACROSS) * ACROSS


@triton.jit(do_not_specialize=_OF_THE_BATCH)
def _attend(
    query, keys, values, block_table, lengths, cu_queries, tree, out, peaks, sums,
    scale, window, pieces, least, tiles,
    query_stride, query_head_stride, key_block, key_token, key_head, value_block, value_token, value_head,
    table_stride, table_width, num_blocks, tokens,
    BLOCK: tl.constexpr, SIZE: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    WINDOW: tl.constexpr, TREE: tl.constexpr, SPLIT: tl.constexpr,
    TILE: tl.constexpr, WIDE: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    part, which = tl.program_id(2) // tiles, tl.program_id(2) % tiles
    first = tl.load(cu_queries + request).to(tl.int64)
    queries = (tl.load(cu_queries + request + 1) - first).to(tl.int32)
    length = tl.load(lengths + request).to(tl.int32)
    row = which * TILE + tl.arange(0, TILE)
    begin = _begin(length, queries, window, WINDOW)
    piece = _piece(length - begin, pieces, least, ACROSS)
    begin += part * piece
    end = tl.minimum(begin + piece, length)
    there = row < queries * GROUP
    # Without positions left only a first piece has anything to say: zeros.
    if (which * TILE < queries * GROUP) & ((begin < end) | (part == 0)):
        token = first + row // GROUP
        head = kv_head * GROUP + row % GROUP
        column = tl.arange(0, WIDE)
        inside = column < SIZE
        q = tl.load(
            query + (token * query_stride + head * query_head_stride)[:, None] + column[None, :],
            mask=there[:, None] & inside[None, :],
            other=0.0,
        )
        start = length - queries
        own = start + row // GROUP
        if TREE:
            seen = tl.load(tree + token, mask=there, other=0)
        peak = tl.full((TILE,), -float("inf"), tl.float32)
        total = tl.zeros((TILE,), tl.float32)
        acc = tl.zeros((TILE, WIDE), tl.float32)
        for at in range(begin, end, ACROSS):
            position = at + tl.arange(0, ACROSS)
            entry = position // BLOCK
            known = (position < end) & (entry < table_width)
            block = tl.load(block_table + request * table_stride + entry, mask=known, other=0).to(tl.int64)
            known &= (block >= 0) & (block < num_blocks)
            slot = (position % BLOCK).to(tl.int64)
            k = tl.load(
                keys + (block * key_block + slot * key_token + kv_head * key_head)[None, :] + column[:, None],
                mask=known[None, :] & inside[:, None],
                other=0.0,
            )
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
            total = total * fade + tl.sum(weights, axis=1)
            peak = higher
        place = token * HEADS + head
        keep = there[:, None] & inside[None, :]
        if SPLIT:
            place += part.to(tl.int64) * tokens * HEADS
            tl.store(peaks + place, peak, mask=there)
            tl.store(sums + place, total, mask=there)
        else:
            acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
        tl.store(out + place[:, None] * SIZE + column[None, :], narrow(acc, out.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=[name for name in _OF_THE_BATCH if name != "tiles"])
def _sum_pieces(
    parts, peaks, sums, lengths, cu_queries, out, window, pieces, least, tokens,
    SIZE: tl.constexpr, HEADS: tl.constexpr, WINDOW: tl.constexpr,
    WIDE: tl.constexpr, ACROSS: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    first = tl.load(cu_queries + request).to(tl.int64)
    queries = (tl.load(cu_queries + request + 1) - first).to(tl.int32)
    length = tl.load(lengths + request).to(tl.int32)
    if tl.program_id(1) < queries:
        reach = length - _begin(length, queries, window, WINDOW)
        used = tl.minimum(tl.maximum(tl.cdiv(reach, _piece(reach, pieces, least, ACROSS)), 1), pieces)
        place = (first + tl.program_id(1)) * HEADS + tl.program_id(2)
        # cast, not to: in the interpreter it is a number, and no tensor.
        stride = tl.cast(tokens, tl.int64) * HEADS
        which = tl.arange(0, PIECES)
        peak = tl.load(peaks + which * stride + place, mask=which < used, other=-float("inf"))
        highest = tl.max(peak, axis=0)
        base = tl.where(highest > -float("inf"), highest, 0.0)
        total = tl.sum(
            tl.load(sums + which * stride + place, mask=which < used, other=0.0) * tl.exp2(peak - base),
            axis=0,
        )
        column = tl.arange(0, WIDE)
        acc = tl.zeros((WIDE,), tl.float32)
        for _ in range(used):
            share = tl.exp2(tl.load(peaks + place) - base)
            acc += share * tl.load(parts + place * SIZE + column, mask=column < SIZE, other=0.0)
            place += stride
        place = (first + tl.program_id(1)) * HEADS + tl.program_id(2)
        acc = acc / tl.where(total > 0.0, total, 1.0)
        tl.store(out + place * SIZE + column, narrow(acc, out.dtype.element_ty), mask=column < SIZE)
