"""Buckets of a weight broadcast, and the limits of its settings."""

from __future__ import annotations

import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import WeightCollective
from paceline.v1.weight_stream_pb2 import WeightPiece
from paceline.weights.rendezvous import (
    SMALLEST_BUCKET,
    BucketWriter,
    head_of,
    local_address,
    most_piece_bytes,
    pieces_of,
)


def pieces(sizes: list[int]) -> list[WeightPiece]:
    """Return pieces with all fields set as large as they may be."""
    top = (1 << 63) - 1
    return [
        WeightPiece(
            position=top,
            file=(1 << 32) - 1,
            offset=top,
            data=bytes([number % 251]) * size,
            crc=zlib.crc32(bytes([number % 251]) * size),
            index=True,
            last=number == len(sizes) - 1,
        )
        for number, size in enumerate(sizes)
    ]


@given(st.lists(st.integers(0, most_piece_bytes(SMALLEST_BUCKET)), min_size=1, max_size=24))
def test_pieces_come_out_of_buckets_as_they_went_in(sizes: list[int]) -> None:
    given_pieces = pieces(sizes)
    # What was in the buffer before does not matter.
    buffer = memoryview(bytearray(b"\xff" * SMALLEST_BUCKET))
    found: list[WeightPiece] = []
    marks: list[tuple[int, bool]] = []
    bucket = BucketWriter(buffer)

    def send(bucket: BucketWriter) -> None:
        bucket.finish(len(marks) + 7)
        marks.append(head_of(buffer))
        found.extend(pieces_of(buffer))

    for piece in given_pieces:
        if not bucket.add(piece):
            send(bucket)
            bucket = BucketWriter(buffer)
            assert bucket.add(piece), "an empty bucket has room for every piece"
    send(bucket)
    assert found == given_pieces
    assert [number for number, _ in marks] == list(range(7, 7 + len(marks)))
    assert [last for _, last in marks] == [False] * (len(marks) - 1) + [True]


def test_a_piece_that_no_bucket_has_room_for_is_an_error_and_no_endless_loop() -> None:
    with pytest.raises(ValueError, match="larger than a bucket"):
        BucketWriter(memoryview(bytearray(SMALLEST_BUCKET))).add(pieces([SMALLEST_BUCKET])[0])


@pytest.mark.parametrize(
    ("length", "content"),
    [(1 << 31, b""), (3, b"\xff\xff\xff"), (60, b"")],
    ids=["longer than the bucket", "no message", "without an end"],
)
def test_what_is_no_bucket_is_refused(length: int, content: bytes) -> None:
    buffer = bytearray(80)
    buffer[9:13] = length.to_bytes(4, "little")
    buffer[13 : 13 + len(content)] = content
    with pytest.raises(ValueError, match=r"piece|bucket"):
        list(pieces_of(memoryview(buffer)))


@pytest.mark.parametrize(
    "fields",
    [
        {"bucket_bytes": 1024},
        {"bucket_bytes": 1 << 31},
        {"stall_seconds": 0.0},
        {"join_seconds": float("nan")},
    ],
)
def test_settings_that_cannot_be_meant_are_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        WeightCollective(**fields)


def test_the_address_is_that_of_the_route_to_the_other_side() -> None:
    assert local_address("127.0.0.1:7500") == "127.0.0.1"
    assert local_address("[::1]:7500") == "::1"
