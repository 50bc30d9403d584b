"""Pieces of a stream, the window of those that may be needed again, and a sender whose peer dies."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.v1 import weight_stream_pb2 as pb
from paceline.v1 import weight_stream_pb2_grpc as rpc
from paceline.weights import safetensors, stream
from paceline.weights.pieces import SendWindow, SourceBehind, cut
from paceline.weights.safetensors import FileWrite
from paceline.weights.stream import SendStalled, WeightSender


@given(
    st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=5), min_size=1, max_size=4), st.integers(1, 50)
)
def test_pieces_have_the_bytes_that_were_written_and_are_no_larger_than_asked(
    files: list[list[int]], most: int
) -> None:
    writes = []
    for number, sizes in enumerate(files):
        offset = 8
        for size in sizes:
            writes.append(FileWrite(number, offset, bytes((number + offset + i) % 251 for i in range(size))))
            offset += size
        writes.append(FileWrite(number, 0, b"\0" * 8))
    writes.append(FileWrite(len(files), 0, b"index" * 7, index=True))
    pieces = list(cut(iter(writes), most))
    assert b"".join(piece.data for piece in pieces) == b"".join(bytes(each.content) for each in writes)
    ends = [piece.position + len(piece.data) for piece in pieces]
    assert [piece.position for piece in pieces] == [0, *ends[:-1]]
    assert all(0 < len(piece.data) <= most and piece.crc == zlib.crc32(piece.data) for piece in pieces)
    assert [piece.last for piece in pieces] == [*[False] * (len(pieces) - 1), True]
    assert {piece.file for piece in pieces if piece.index} == {len(files)}
    # As few as the order of the files allows.
    joins = [
        (one.file, one.offset + len(one.data)) == (two.file, two.offset)
        and len(one.data) + len(two.data) <= most
        and not two.index
        for one, two in pairwise(pieces)
    ]
    small = [size for sizes in files for size in sizes if size > most]
    assert small or not any(joins)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=40))
def test_a_window_has_what_is_not_confirmed(steps: list[tuple[bool, int]]) -> None:
    window, added, confirmed = SendWindow(), 0, 0
    for adds, amount in steps:
        if adds:
            window.add(pb.WeightPiece(position=added, data=bytes(amount + 1)))
            added += amount + 1
        else:
            confirmed = max(confirmed, min(added, confirmed + amount))
            window.confirm(confirmed)
        assert window.begin <= confirmed
        assert window.end == added
        pieces = list(window.since(confirmed))
        assert sum(len(piece.data) for piece in pieces) >= added - confirmed
        if pieces:
            assert pieces[0].position <= confirmed
        if window.begin:
            with pytest.raises(SourceBehind):
                list(window.since(window.begin - 1))


class Receiver(rpc.WeightStreamServiceServicer):
    """An instance that takes bytes, and dies once it has so many."""

    def __init__(self, dies_at: int | None, confirms: bool) -> None:
        self.dies_at, self.confirms = dies_at, confirms
        self.data = bytearray()
        self.tickets: list[Any] = []

    def PushWeights(self, requests: Iterator[pb.PushWeightsRequest], context: Any) -> Iterator[Any]:
        self.tickets.append(dict(context.invocation_metadata()).get("authorization"))
        yield pb.PushWeightsResponse(received=len(self.data))
        for request in requests:
            known = len(self.data) - request.piece.position
            assert known >= 0
            self.data += request.piece.data[known:]
            if self.dies_at is not None and len(self.data) >= self.dies_at:
                context.abort(grpc.StatusCode.UNAVAILABLE, "it died")
            confirmed = len(self.data) if self.confirms else 0
            yield pb.PushWeightsResponse(received=len(self.data), confirmed=confirmed)


@contextmanager
def served(receiver: rpc.WeightStreamServiceServicer) -> Iterator[grpc.Channel]:
    server = grpc.server(ThreadPoolExecutor(2))
    rpc.add_WeightStreamServiceServicer_to_server(receiver, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    server.stop(None).wait()


def content() -> tuple[Iterator[pb.WeightPiece], bytes]:
    tensors = {f"w{number}": np.full(1000, number, np.float32) for number in range(20)}
    written = list(safetensors.lay_out(tensors, 150_000))
    whole = b"".join(bytes(each.content) for each in written)
    return cut(safetensors.lay_out(tensors, 150_000), 4096), whole


def test_another_instance_gets_what_the_first_one_had_not_passed_on() -> None:
    pieces, whole = content()
    sender = WeightSender(pieces, len(whole), 30.0)
    first, second = Receiver(dies_at=200_000, confirms=False), Receiver(None, confirms=True)
    with served(first) as channel, pytest.raises(grpc.RpcError, match="it died"):
        sender.send(channel, "t1")
    second.data += whole[:10_001]
    with served(second) as channel:
        sender.send(channel, "t2")
    assert bytes(second.data) == whole
    assert (first.tickets, second.tickets) == (["Bearer t1"], ["Bearer t2"])
    assert sender.reached == len(whole)
    assert sender.checksum.startswith("index-sha256:")


def test_bytes_that_are_kept_no_more_are_missed() -> None:
    pieces, whole = content()
    sender = WeightSender(pieces, 8192, 30.0)
    with served(Receiver(dies_at=len(whole) // 2, confirms=True)) as channel, pytest.raises(grpc.RpcError):
        sender.send(channel, "t")
    with served(Receiver(None, confirms=True)) as channel, pytest.raises(SourceBehind, match="position 0"):
        sender.send(channel, "t")


def test_no_more_than_the_window_is_sent_ahead_and_silence_ends_it() -> None:
    pieces, whole = content()
    silent = Receiver(None, confirms=False)
    sender = WeightSender(pieces, 8192, 0.5)
    with served(silent) as channel, pytest.raises(SendStalled):
        sender.send(channel, "t")
    assert len(silent.data) <= 8192 + 4096 < len(whole)


class Deaf(rpc.WeightStreamServiceServicer):
    """An instance that says that it has nothing, and reads nothing."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def PushWeights(self, requests: Iterator[pb.PushWeightsRequest], context: Any) -> Iterator[Any]:
        context.add_callback(self.over.set)
        yield pb.PushWeightsResponse(received=0)
        self.over.wait()


def test_what_is_sent_ahead_is_in_memory_once(monkeypatch: pytest.MonkeyPatch) -> None:
    count, piece_bytes = 64, 1 << 20
    pieces = [pb.WeightPiece(position=n * piece_bytes, data=bytes(piece_bytes)) for n in range(count)]
    made = []

    def request(**fields: Any) -> pb.PushWeightsRequest:
        made.append(fields["piece"].position)
        return pb.PushWeightsRequest(**fields)

    monkeypatch.setattr(stream, "pb", SimpleNamespace(PushWeightsRequest=request))
    sender = WeightSender(iter(pieces), count * piece_bytes, 0.5)
    with served(Deaf()) as channel, pytest.raises(SendStalled):
        sender.send(channel, "t")
    # All are kept for another instance. Of requests, which have copies, there are the few MB that gRPC takes.
    assert sender._window.bytes == count * piece_bytes
    assert 0 < len(made) < count // 2
