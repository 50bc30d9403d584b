"""Frames: what is written is what is read, and nothing else is."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.generation.kv_transfer.links import (
    HEADER_BYTES,
    MOST_TEXT,
    BadFrame,
    Frame,
    FrameKind,
    Hello,
    running_crc,
)

WORD = st.integers(0, 2**32 - 1)


@given(WORD, WORD, WORD, st.integers(0, 2**64 - 1))
def test_a_header_is_read_as_it_was_written(begin: int, count: int, crc: int, length: int) -> None:
    frame = Frame(FrameKind.KV, begin, count, crc, length)
    assert len(frame.encode()) == HEADER_BYTES
    assert Frame.decode(frame.encode()) == frame


@given(st.binary(max_size=2 * HEADER_BYTES))
def test_noise_is_no_header(data: bytes) -> None:
    with pytest.raises(BadFrame):
        Frame.decode(data)


@pytest.mark.parametrize("kind", [kind for kind in FrameKind if kind is not FrameKind.KV])
def test_only_kv_is_long(kind: FrameKind) -> None:
    assert Frame.decode(Frame(kind, length=MOST_TEXT).encode()).length == MOST_TEXT
    with pytest.raises(BadFrame):
        Frame.decode(Frame(kind, length=MOST_TEXT + 1).encode())


def test_an_unknown_kind_is_no_header() -> None:
    data = bytearray(Frame(FrameKind.KV).encode())
    data[4] = 99
    with pytest.raises(BadFrame):
        Frame.decode(data)


@given(st.text(max_size=80), WORD, st.binary(max_size=64))
def test_a_hello_is_read_as_it_was_written(name: str, rank: int, token: bytes) -> None:
    hello = Hello(name, rank, token)
    assert Hello.decode(hello.encode()) == hello


@given(st.binary(max_size=64))
def test_noise_is_a_hello_or_refused(data: bytes) -> None:
    try:
        hello = Hello.decode(data)
    except BadFrame:
        return
    assert hello.encode() == data


@given(st.lists(st.binary(min_size=1, max_size=40), min_size=2, max_size=6), st.data())
def test_the_running_crc_tells_one_broken_or_swapped_payload(
    payloads: list[bytes], data: st.DataObject
) -> None:
    def crc(parts: list[bytes]) -> int:
        found = 0
        for part in parts:
            found = running_crc(found, zlib.crc32(part))
        return found

    i = data.draw(st.integers(0, len(payloads) - 1))
    broken = list(payloads)
    broken[i] = bytes([broken[i][0] ^ 1]) + broken[i][1:]
    assert crc(broken) != crc(payloads)
    swapped = payloads[1:] + payloads[:1]
    assert (crc(swapped) == crc(payloads)) == (swapped == payloads)
