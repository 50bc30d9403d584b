"""Table of guesses: what is read is what was written last, up to its end."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.draft_table import DraftTable, Segments

SLOTS, LENGTH = 4, 24
CPU = torch.device("cpu")


@st.composite
def segments(draw):
    """Segments of some rows, in any order, that lie within them."""
    found = []
    for slot in draw(st.permutations(range(SLOTS)))[: draw(st.integers(0, SLOTS))]:
        start = draw(st.integers(0, LENGTH - 1))
        tokens = draw(st.lists(st.integers(1, 99), max_size=LENGTH - start))
        found.append((slot, start, tokens))
    return found


@given(st.lists(segments(), max_size=5), st.lists(st.integers(0, LENGTH + 3), min_size=SLOTS, max_size=SLOTS))
def test_the_latest_segment_ends_a_row_and_older_ones_are_before_it(written, behind):
    table = DraftTable(SLOTS, LENGTH, CPU)
    rows, ends = [[0] * LENGTH for _ in range(SLOTS)], [0] * SLOTS
    for step in written:
        table.write(Segments.of(step))
        for slot, start, tokens in step:
            rows[slot][start : start + len(tokens)] = tokens
            ends[slot] = start + len(tokens)
    order = torch.arange(SLOTS).flip(0)
    found = table.gather(order, torch.tensor(behind, dtype=torch.int32).flip(0), 5).flip(0)
    expected = [
        [rows[slot][at] if at < ends[slot] else 0 for at in range(behind[slot], behind[slot] + 5)]
        for slot in range(SLOTS)
    ]
    assert found.tolist() == expected
