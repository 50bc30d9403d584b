"""One pass over pieces for several readers."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from paceline.errors import CancelledError
from paceline.v1.weight_stream_pb2 import WeightPiece
from paceline.weights.pieces import PieceTee

SECONDS = 60.0


class Source:
    """Pieces of ten bytes each, and how many were asked for."""

    def __init__(self, count: int, error: Exception | None = None) -> None:
        self.made = 0
        self._count = count
        self._error = error
        self.reached = threading.Semaphore(0)

    def __iter__(self) -> Iterator[WeightPiece]:
        for number in range(self._count):
            self.made += 1
            self.reached.release()
            yield WeightPiece(position=10 * number, data=bytes(10))
        if self._error is not None:
            raise self._error

    def wait_for(self, count: int) -> None:
        for _ in range(count):
            assert self.reached.acquire(timeout=SECONDS)


def feeding(tee: PieceTee, source: Source) -> threading.Thread:
    thread = threading.Thread(target=tee.feed, args=(source,), daemon=True)
    thread.start()
    return thread


def test_every_reader_gets_every_piece_and_the_slowest_sets_the_pace() -> None:
    tee, source = PieceTee(2, 30), Source(100)
    thread = feeding(tee, source)
    fast, slow = tee.pieces(0), tee.pieces(1)
    # Three are kept for the slow one, and the fourth is made.
    assert [next(fast).position for _ in range(3)] == [0, 10, 20]
    source.wait_for(4)
    assert source.made == 4
    assert next(slow).position == 0
    assert next(fast).position == 30
    reader = threading.Thread(target=lambda: list(slow), daemon=True)
    reader.start()
    assert [piece.position for piece in fast] == list(range(40, 1000, 10))
    for each in (thread, reader):
        each.join(SECONDS)
        assert not each.is_alive()


def test_a_reader_that_leaves_holds_nobody_back() -> None:
    tee, source = PieceTee(2, 10), Source(50)
    left, stays = tee.pieces(0), tee.pieces(1)
    thread = feeding(tee, source)
    next(left)
    left.close()  # type: ignore[attr-defined]
    assert len(list(stays)) == 50
    thread.join(SECONDS)
    assert not thread.is_alive()


def test_a_pass_that_nobody_reads_any_more_ends() -> None:
    tee, source = PieceTee(1, 10), Source(50)
    reader = tee.pieces(0)
    thread = feeding(tee, source)
    next(reader)
    reader.close()  # type: ignore[attr-defined]
    thread.join(SECONDS)
    assert not thread.is_alive()
    assert source.made < 50


def test_a_pass_that_is_stopped_ends_the_feed_and_the_readers() -> None:
    tee, source = PieceTee(2, 10), Source(50)
    thread = feeding(tee, source)
    source.wait_for(2)
    tee.stop()
    thread.join(SECONDS)
    assert not thread.is_alive()
    for reader in range(2):
        with pytest.raises(CancelledError, match="another shard failed"):
            list(tee.pieces(reader))


def test_the_source_s_error_reaches_the_feed_and_the_readers() -> None:
    tee = PieceTee(2, 1000)
    with pytest.raises(ValueError, match="broken"):
        tee.feed(Source(3, ValueError("broken")))
    for reader in range(2):
        with pytest.raises(ValueError, match="broken"):
            list(tee.pieces(reader))
