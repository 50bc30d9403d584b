"""Receiving a version: bytes in any cut, positions of followers, and the choice of a peer."""

from __future__ import annotations

import subprocess
import sys
import zlib
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.v1 import weight_stream_pb2 as pb
from paceline.weights import safetensors
from paceline.weights.pieces import cut
from services.contracts.errors import DataLoss, FailedPrecondition, InvalidArgument
from services.generation.weights.stream import stored_stream
from services.generation.weights.stream.reception import Followers, PeerOrder
from services.generation.weights.stream.stored_stream import StoredStream

TENSORS = {f"w{number}": np.arange(500.0) + number for number in range(9)}
SHARD_BYTES = (128 << 10) + 9000


@settings(max_examples=8, deadline=None)
@given(st.lists(st.integers(20_000, 90_000), min_size=1, max_size=8), st.integers(30_000, 200_000))
def test_what_is_read_in_any_cut_is_what_was_put(cuts: list[int], most: int) -> None:
    with TemporaryDirectory() as name:
        root = Path(name)
        folders = [root / each for each in ("wanted", "one", "two")]
        for folder in folders:
            folder.mkdir()
        safetensors.write(folders[0], TENSORS, SHARD_BYTES)
        one, two = StoredStream(folders[1]), StoredStream(folders[2])
        turn = 0
        for piece in cut(safetensors.lay_out(TENSORS, SHARD_BYTES), most):
            one.put(piece)
            # The second one is some way behind, and sometimes asks for what it has.
            while two.log.end + 50_000 < one.log.end:
                two.put(one.read(max(0, two.log.end - turn % 3), cuts[turn % len(cuts)]))
                turn += 1
        while not two.whole:
            two.put(one.read(two.log.end, cuts[turn % len(cuts)]))
            turn += 1
        wanted = {path.name: path.read_bytes() for path in folders[0].iterdir()}
        for stream in (one, two):
            assert {path.name: path.read_bytes() for path in stream.folder.iterdir()} == wanted
            assert stream.checksum == safetensors.checksum(folders[0])
        # A folder that is whole has the same stream.
        again = StoredStream.of_folder(folders[0])
        assert again.log.end == one.log.end
        position = 0
        while position < again.log.end:
            piece = again.read(position, most)
            assert piece == one.read(position, most)
            position += len(piece.data)
        assert piece.last


def test_pieces_that_are_corrupt_or_not_the_next_change_nothing(tmp_path: Path) -> None:
    stream = StoredStream(tmp_path)
    data = b"12345678"
    good = pb.WeightPiece(position=0, file=0, offset=8, data=data, crc=zlib.crc32(data))
    bad = pb.WeightPiece(position=0, file=0, offset=8, data=data, crc=1)
    with pytest.raises(DataLoss, match="position 0 are corrupt"):
        stream.put(bad)
    with pytest.raises(FailedPrecondition, match="where 0 is the next"):
        stream.put(pb.WeightPiece(position=8, file=0, offset=16, data=data, crc=good.crc))
    with pytest.raises(FailedPrecondition, match="file 7 came"):
        stream.put(pb.WeightPiece(position=0, file=7, offset=8, data=data, crc=good.crc))
    stream.put(good)
    stream.put(good)
    assert stream.log.end == 8


def placed(stream: StoredStream, file: int, offset: int, size: int, *, index: bool = False) -> pb.WeightPiece:
    """Return the next bytes of a stream, for a place of a file."""
    data = bytes(size)
    position, crc = stream.log.end, zlib.crc32(data)
    return pb.WeightPiece(position=position, file=file, offset=offset, data=data, crc=crc, index=index)


def test_files_of_more_bytes_than_the_model_has_are_refused(tmp_path: Path) -> None:
    stream = StoredStream(tmp_path, most_bytes=2000)
    stream.put(placed(stream, 0, 8, 1000))
    # Of the same file, of the next one, and of a hole.
    for file, offset in ((0, 1008), (1, 8), (1, 1 << 40)):
        with pytest.raises(InvalidArgument, match="than the model that is served can have"):
            stream.put(placed(stream, file, offset, 1000))
    stream.put(placed(stream, 0, 1008, 992))
    # A header has the room before the tensors.
    stream.put(placed(stream, 0, 0, 8))
    assert stream.log.end == 2000
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == 2000


def test_each_byte_comes_once_the_tensors_before_their_header(tmp_path: Path) -> None:
    """Otherwise a sender could write the same bytes again and again, without end."""
    stream = StoredStream(tmp_path, most_bytes=100)

    def refuses(*places: tuple[int, int, int], index: bool = False) -> None:
        before = stream.log.end
        for file, offset, size in places:
            with pytest.raises(InvalidArgument, match=f"is {offset} of file {file}; "):
                stream.put(placed(stream, file, offset, size, index=index))
        assert stream.log.end == before

    stream.put(placed(stream, 0, 8, 4))
    refuses((0, 8, 4), (0, 11, 1), (0, 13, 1), (0, 4, 1), (0, 0, 9))
    stream.put(placed(stream, 0, 12, 4))
    stream.put(placed(stream, 0, 0, 4))
    refuses((0, 0, 4), (0, 4, 5), (0, 16, 1))
    stream.put(placed(stream, 0, 4, 4))
    refuses((0, 8, 1), (0, 0, 1), (0, 16, 1))
    # A file without tensors is its header.
    stream.put(placed(stream, 1, 0, 4))
    refuses((1, 0, 4))
    refuses((1, 0, 4), (2, 1, 4), index=True)
    stream.put(placed(stream, 2, 0, 4, index=True))
    refuses((2, 0, 4), (3, 4, 4), index=True)
    stream.put(placed(stream, 2, 4, 4, index=True))
    assert stream.log.end == 16 + 4 + 8


def test_an_index_of_more_bytes_than_any_has_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_stream, "MOST_INDEX_BYTES", 1500)
    stream = StoredStream(tmp_path)
    stream.put(placed(stream, 0, 0, 1000, index=True))
    with pytest.raises(InvalidArgument, match="500 too many"):
        stream.put(placed(stream, 0, 1000, 1000, index=True))


LIMITED = """
import resource, signal, sys, zlib
from pathlib import Path
from paceline.v1 import weight_stream_pb2 as pb
from services.contracts.errors import ResourceExhausted
from services.generation.weights.stream.stored_stream import StoredStream

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
stream, data = StoredStream(Path(sys.argv[1])), bytes(60_000)
for number in range(2):
    piece = pb.WeightPiece(
        position=number * 60_000, file=0, offset=8 + number * 60_000, data=data, crc=zlib.crc32(data)
    )
    try:
        stream.put(piece)
    except ResourceExhausted as error:
        print(number, stream.log.end, error.message)
"""


def test_a_file_that_cannot_grow_is_exhaustion(tmp_path: Path) -> None:
    """The limit of a process for the size of its files stands for a quota: the kernel refuses the write."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, tmp_path], check=True, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.startswith("1 60000 weights cannot be written to")


def test_the_foremost_follower_says_what_is_confirmed() -> None:
    followers = Followers(grace=3.0, now=0.0)
    # One is expected.
    assert followers.confirmed(10, True, 1.0) == 0
    one, two = followers.join(0, 1.0), followers.join(4, 1.0)
    followers.acknowledge(one, 8, 2.0)
    assert followers.confirmed(10, True, 2.0) == 8
    followers.leave(one)
    # What was confirmed stays so.
    assert followers.confirmed(10, True, 3.0) == 8
    followers.acknowledge(two, 9, 3.0)
    assert followers.confirmed(12, True, 4.0) == 9
    # It hangs.
    assert followers.confirmed(12, True, 6.5) == 12


def test_where_nobody_follows_what_came_is_confirmed() -> None:
    assert Followers(grace=3.0, now=0.0).confirmed(10, False, 0.0) == 10
    waiting = Followers(grace=3.0, now=0.0)
    assert [waiting.confirmed(10, True, now) for now in (0.0, 3.0, 3.1)] == [0, 0, 10]


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 5)), max_size=30))
def test_the_nearest_peer_that_is_not_left_alone_is_chosen(failures: list[tuple[int, float]]) -> None:
    addresses, now = ["a", "b", "c", "d"], 0.0
    order = PeerOrder(addresses)
    until = dict.fromkeys(addresses, 0.0)
    counts = dict.fromkeys(addresses, 0)
    for number, passes in failures:
        now += passes
        free = [each for each in addresses if until[each] <= now]
        assert order.choose(now) == (free[0] if free else None)
        if not free:
            wait = order.wait(now)
            assert wait is not None
            assert order.choose(now + wait) is not None
        failed = addresses[number]
        order.failed(failed, now)
        until[failed] = now + min(4.0, 0.25 * 2 ** counts[failed])
        counts[failed] += 1
    order.worked("a")
    order.failed("a", now)
    assert order.choose(now + 0.25) == "a"


def test_without_peers_there_is_nothing_to_choose() -> None:
    assert (PeerOrder([]).choose(0.0), PeerOrder([]).wait(0.0)) == (None, None)
