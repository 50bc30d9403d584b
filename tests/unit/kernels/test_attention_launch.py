"""How steps are cut into programs: from bounds only, and always within the memory that was set aside."""

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kernels.short_query_attention.launch import (
    LARGEST_TILE,
    LEAST_PIECE,
    MOST_PIECES,
    PROGRAMS_WANTED,
    Scratch,
    cut,
    tile_rows,
)

STEPS = {
    "requests": st.integers(1, 600),
    "kv_heads": st.integers(1, 16),
    "longest_query": st.integers(1, 16),
    "group": st.integers(1, 64),
    "reach": st.integers(0, 200_000),
}


@given(**STEPS)
def test_a_cut_has_a_row_for_every_query_and_no_more_programs_than_wanted(
    requests, kv_heads, longest_query, group, reach
):
    made = cut(requests, kv_heads, longest_query, group, reach)
    rows = longest_query * group
    assert made.tiles * made.tile >= rows > (made.tiles - 1) * made.tile
    assert 16 <= made.tile <= LARGEST_TILE
    assert 1 <= made.pieces <= MOST_PIECES
    assert made.pieces == 1 or requests * kv_heads * made.tiles * made.pieces <= PROGRAMS_WANTED
    assert made.pieces == 1 or made.pieces * LEAST_PIECE <= reach


@given(**STEPS, longest_planned=st.integers(1, 16))
@example(requests=1, kv_heads=1, longest_query=16, group=8, reach=100_000, longest_planned=16)
def test_the_memory_for_a_longest_query_does_for_every_step(
    requests, kv_heads, longest_query, group, reach, longest_planned
):
    longest_query = min(longest_query, longest_planned)
    made = cut(requests, kv_heads, longest_query, group, reach)
    tokens = requests * longest_query
    if made.pieces > 1:
        assert made.pieces * tokens * kv_heads * group <= Scratch.rows_for(longest_planned, group)


def test_a_tile_grows_with_the_rows_of_a_request():
    assert [tile_rows(longest, 2) for longest in (1, 8, 9, 16, 17)] == [16, 16, 32, 32, 64]
    assert tile_rows(16, 64) == LARGEST_TILE


def test_memory_is_of_floats_whatever_is_computed():
    scratch = Scratch.of(12, 32, torch.device("cpu"))
    assert scratch.rows == 12
    assert scratch.parts.shape == (12, 32)
    assert {t.dtype for t in (scratch.parts, scratch.peaks, scratch.sums)} == {torch.float32}
