"""How launches are sized: from the device and from bounds only."""

import torch

from kernels.short_query_attention.inputs import Scratch, programs_for, tile_rows
from kernels.tuning import Tuning

CPU = torch.device("cpu")


def test_a_tile_grows_with_the_rows_of_a_request():
    assert [tile_rows(longest, 2, 64) for longest in (1, 8, 9, 16, 17)] == [16, 16, 32, 32, 64]
    assert tile_rows(16, 64, 64) == 64
    assert tile_rows(1, 1, 8) == 16


def test_the_memory_holds_two_tiles_of_every_program():
    chosen = Tuning(attention_programs=3, attention_tile=32)
    assert Scratch.rows_for(16, 8, CPU, chosen) == 2 * programs_for(CPU, chosen) * 32
    assert programs_for(CPU, chosen) % 3 == 0


def test_memory_is_of_floats_whatever_is_computed():
    scratch = Scratch.of(12, 32, CPU)
    assert scratch.rows == 12
    assert scratch.parts.shape == (12, 32)
    assert {t.dtype for t in (scratch.parts, scratch.peaks, scratch.sums)} == {torch.float32}
