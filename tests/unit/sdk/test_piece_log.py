"""Places in a version's stream: any cut of the bytes, read from any position, gives the files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.weights import safetensors
from paceline.weights.pieces import PieceLog


def test_the_bytes_that_are_laid_out_are_those_of_the_files(tmp_path: Path) -> None:
    tensors = {f"w{number}": np.arange(100.0) + number for number in range(5)}
    safetensors.write(tmp_path, tensors, (128 << 10) + 2000)
    found: dict[int, bytearray] = {}
    for each in safetensors.lay_out(tensors, (128 << 10) + 2000):
        file = found.setdefault(each.file, bytearray())
        file.extend(bytes(max(0, each.offset + len(each.content) - len(file))))
        file[each.offset : each.offset + len(each.content)] = each.content
    names = [safetensors.shard_name(number, 3) for number in range(3)]
    assert [bytes(each) for each in found.values()] == [
        (tmp_path / name).read_bytes() for name in (*names, safetensors.INDEX)
    ]


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=6),
    st.lists(st.integers(1, 17), min_size=1, max_size=50),
    st.integers(0, 200),
    st.integers(1, 23),
)
def test_every_position_has_the_byte_that_was_put_there(
    sizes: list[int], cuts: list[int], start: int, most: int
) -> None:
    # Each file: a header of 3 bytes that comes last, behind the bytes at 3 and on.
    order = [(file, offset) for file, size in enumerate(sizes) for offset in (*range(3, 3 + size), *range(3))]
    log, at = PieceLog(), 0
    while at < len(order):
        file, offset = order[at]
        size, wanted = 0, cuts[at % len(cuts)]
        while size < wanted and order[at + size : at + size + 1] == [(file, offset + size)]:
            size += 1
        log.append(file, offset, size)
        at += size
        assert log.end == at
    position = min(start, len(order) - 1)
    read = []
    while position < log.end:
        segment = log.at(position, most)
        assert segment.position == position
        assert 0 < segment.size <= most
        read += [(segment.file, segment.offset + step) for step in range(segment.size)]
        position = segment.end
    assert read == order[min(start, len(order) - 1) :]
