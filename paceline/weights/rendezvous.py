"""Protocol between the ranks of a weight broadcast: the rendezvous, and the buckets that they exchange.

The rendezvous is a set of keys in a store (torch.distributed.TCPStore) of the trainer. A broadcast is done in
rounds, each with a process group. A rank that is ready for a round reports the position behind the bytes that it
has; the trainer, which is rank 0, then names the ranks of the round. When a rank fails, the round is lost for
all, and the ranks that live meet for the next one. Every wait has a limit.

A bucket holds the pieces of the stream that one broadcast carries. It begins with a request for acknowledgement
(a number, 0 for none) and a mark of the last bucket. Pieces follow, each after its length; a length of zero ends
them.

Only `host`, `join` and the process groups import torch.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

from paceline.files import parse_object
from paceline.v1.weight_pb2 import CollectiveRendezvous
from paceline.v1.weight_stream_pb2 import WeightPiece


class RankGone(Exception):
    """Raised when another rank failed, is gone, or is slower than the limit."""


class TrainerGone(RankGone):
    """Raised when the trainer, which has the store, is gone."""


class SlowRanks(RankGone):
    """Raised when ranks are slower than the limit; `instance_ids` names them."""

    def __init__(self, text: str, instance_ids: Sequence[str]) -> None:
        super().__init__(text)
        self.instance_ids = tuple(instance_ids)


class NotOfRound(Exception):
    """Raised on a rank that the trainer has left out, or whose broadcast the trainer has given up."""


def local_address(peer: str) -> str:
    """Return the address of this machine from which a host and port is reached. OSError: it cannot be."""
    host, _, port = peer.rpartition(":")
    family, _, _, _, to = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # Nothing is sent: the kernel chooses the route.
        probe.connect(to)
        return str(probe.getsockname()[0])


@dataclass(frozen=True, slots=True)
class RoundRanks:
    """Ranks of a round: the instances, in the order of their ranks from 1 on."""

    number: int
    instance_ids: tuple[str, ...]

    @property
    def size(self) -> int:
        """Number of ranks, that of the trainer included."""
        return len(self.instance_ids) + 1


class Rendezvous:
    """Keys of one broadcast. The methods that raise RankGone take no longer than the limits."""

    def __init__(self, store: Any, keys: Any, host: str, described: CollectiveRendezvous) -> None:
        self.described = described
        self.stall_seconds = described.stall.ToTimedelta().total_seconds()
        self.join_seconds = described.join.ToTimedelta().total_seconds()
        self._store = store
        self._keys = keys
        self._host = host
        self._next = 0
        """Number of the round that comes next, on the trainer."""

    @classmethod
    def host(cls, address: str, port: int, described: CollectiveRendezvous) -> Self:
        """Open the store, on the trainer. Its address is set in `described`.

        Raises:
            ImportError: torch is not installed, or has no gloo.
            OSError: the port is taken.
        """
        from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

        assert ProcessGroupGloo is not None
        limit = described.stall.ToTimedelta()
        try:
            store = TCPStore(address, port, is_master=True, timeout=limit, wait_for_workers=False)
        except RuntimeError as error:
            raise OSError(f"the store of the broadcast cannot listen on port {port}: {error}") from error
        shown = f"[{address}]" if ":" in address else address
        described.address = f"{shown}:{store.port}"
        return cls(store, PrefixStore(described.key, store), address, described)

    @classmethod
    def join(cls, described: CollectiveRendezvous) -> Self:
        """Connect to the trainer's store, on an instance. RankGone: it cannot be reached."""
        from torch.distributed import PrefixStore, TCPStore

        host, _, port = described.address.rpartition(":")
        host = host.strip("[]")
        try:
            own = local_address(described.address)
            limit = described.stall.ToTimedelta()
            store = TCPStore(host, int(port), is_master=False, timeout=limit, wait_for_workers=False)
        except (RuntimeError, OSError) as error:
            text = f"the store of the trainer at {described.address} cannot be reached"
            raise RankGone(f"{text}: {_line(error)}") from error
        return cls(store, PrefixStore(described.key, store), own, described)

    # The trainer's side ---------------------------------------------------------------------------------

    def present(self, number: int, instance_ids: Iterable[str]) -> dict[str, int]:
        """Return those that are ready for a round, with the positions behind what they have."""
        with _store_lives():
            keys = {each: f"ready/{number}/{each}" for each in instance_ids}
            return {each: int(self._keys.get(key)) for each, key in keys.items() if self._keys.check([key])}

    def gone(self, instance_ids: Iterable[str]) -> dict[str, str]:
        """Return those that have ended with an error, with their reasons."""
        with _store_lives():
            keys = {each: f"gone/{each}" for each in instance_ids}
            return {each: _text(self._keys.get(key)) for each, key in keys.items() if self._keys.check([key])}

    def complete(self, instance_ids: Iterable[str]) -> set[str]:
        """Return those that have all, and are ready for no other round."""
        with _store_lives():
            return {each for each in instance_ids if self._keys.check([f"complete/{each}"])}

    def open_round(self, ranks: RoundRanks) -> Any:
        """Name the ranks of a round, and return its process group, of which this is rank 0."""
        with _store_lives():
            self._keys.set(f"round/{ranks.number}", json.dumps({"ranks": ranks.instance_ids}))
        self._next = ranks.number + 1
        return self._group(ranks, 0)

    def close(self, reason: str) -> None:
        """Say that there will be no more rounds."""
        with suppress(RuntimeError):
            self._keys.set(f"round/{self._next}", json.dumps({"over": reason}))

    def await_acknowledged(self, ranks: RoundRanks, acknowledgement: int, position: int) -> None:
        """Wait until all ranks have the bytes before a position. RankGone names those that have not."""
        deadline = time.monotonic() + self.stall_seconds
        key = f"acks/{ranks.number}/{acknowledgement}"
        while True:
            with _store_lives():
                if self._keys.add(key, 0) >= len(ranks.instance_ids):
                    return
            self.check(ranks)
            if time.monotonic() > deadline:
                behind = [each for each in ranks.instance_ids if self._position(ranks, each) < position]
                text = f"slower than {self.stall_seconds:g} s to acknowledge position {position}"
                raise SlowRanks(f"{', '.join(behind)}: {text}", behind)
            time.sleep(0.002)

    def check(self, ranks: RoundRanks) -> None:
        """Raise RankGone if a rank of this round has said that the round is lost."""
        with _store_lives():
            if self._keys.check([f"lost/{ranks.number}"]):
                raise RankGone(_text(self._keys.get(f"lost/{ranks.number}")))

    def _position(self, ranks: RoundRanks, instance_id: str) -> int:
        key = f"has/{ranks.number}/{instance_id}"
        with _store_lives():
            return int(self._keys.get(key)) if self._keys.check([key]) else 0

    # An instance's side ---------------------------------------------------------------------------------

    def enter_round(self, number: int, instance_id: str, position: int) -> tuple[RoundRanks, Any]:
        """Wait for the ranks of a round; return them and the process group, which this one is a rank of.

        Raises:
            TrainerGone: the trainer is gone.
            RankGone: the round was lost before it began.
            NotOfRound: this instance is not one of them.
        """
        with _store_lives():
            self._keys.set(f"ready/{number}/{instance_id}", str(position))
            # The trainer waits for others meanwhile.
            self._keys.wait(
                [f"round/{number}"], timedelta(seconds=self.join_seconds + 3 * self.stall_seconds)
            )
            content = self._keys.get(f"round/{number}")
        try:
            told = parse_object(content)
            if "over" in told:
                raise NotOfRound(f"the trainer ended the broadcast: {told['over']}")
            ranks = RoundRanks(number, tuple(map(str, told["ranks"])))
        except (ValueError, KeyError, TypeError) as error:
            raise NotOfRound(f"what the trainer says of round {number} cannot be read: {error!r}") from error
        if instance_id not in ranks.instance_ids:
            raise NotOfRound(f"{instance_id} was not ready in time, and was left out of round {number}")
        return ranks, self._group(ranks, ranks.instance_ids.index(instance_id) + 1)

    def acknowledge(self, ranks: RoundRanks, acknowledgement: int, instance_id: str, position: int) -> None:
        """Say that this instance has the bytes before a position."""
        with _store_lives():
            self._keys.set(f"has/{ranks.number}/{instance_id}", str(position))
            self._keys.add(f"acks/{ranks.number}/{acknowledgement}", 1)

    def finish(self, instance_id: str) -> None:
        """Say that this instance has all."""
        with suppress(RuntimeError):
            self._keys.set(f"complete/{instance_id}", "")

    def lose_round(self, number: int, reason: str) -> None:
        """Say that a round is lost."""
        with suppress(RuntimeError):
            self._keys.set(f"lost/{number}", reason)

    def leave(self, instance_id: str, number: int, reason: str) -> None:
        """Say that this instance takes part no more, so that nobody waits for it."""
        with suppress(RuntimeError):
            self._keys.set(f"gone/{instance_id}", reason)
        self.lose_round(number, f"{instance_id}: {reason}")

    # Both -----------------------------------------------------------------------------------------------

    def _group(self, ranks: RoundRanks, rank: int) -> Any:
        from torch.distributed import PrefixStore, ProcessGroupGloo

        options = ProcessGroupGloo._Options()
        # Of the right interface, not of the one that this machine's name happens to mean; connections are made when
        # they are needed, since a mesh of all ranks would have a million.
        options._devices = [ProcessGroupGloo.create_device(hostname=self._host, lazy_init=True)]
        options._timeout = timedelta(seconds=self.stall_seconds)
        with round_lives():
            return ProcessGroupGloo(
                PrefixStore(f"group/{ranks.number}", self._keys), rank, ranks.size, options
            )


@contextmanager
def round_lives() -> Iterator[None]:
    """Turn an error of a process group into RankGone."""
    try:
        yield
    except RuntimeError as error:
        raise RankGone(_line(error)) from error


@contextmanager
def _store_lives() -> Iterator[None]:
    """Turn an error of the store into TrainerGone: the trainer has it."""
    try:
        yield
    except RuntimeError as error:
        raise TrainerGone(f"the trainer's store does not answer: {_line(error)}") from error


def _line(error: BaseException) -> str:
    """Return the first line of an error: torch appends its stack."""
    return (str(error).splitlines() or [repr(error)])[0][:300]


def _text(value: bytes) -> str:
    return value.decode(errors="replace")


SMALLEST_BUCKET = 64 << 10
"""Bytes of the smallest bucket."""
_HEAD = struct.Struct("<QB")
_LENGTH = struct.Struct("<I")
# Most that the fields of a piece take beside its data.
_FIELDS = 64


def most_piece_bytes(bucket_bytes: int) -> int:
    """Return the bytes of the pieces to cut for buckets of this size: a bucket has several."""
    return min(1 << 20, bucket_bytes // 4)


class BucketWriter:
    """A bucket that is being filled."""

    def __init__(self, buffer: memoryview) -> None:
        """Fill this buffer of bytes from its beginning."""
        self._buffer = buffer
        self._end = _HEAD.size
        self._last = False

    @property
    def empty(self) -> bool:
        """True while it has no piece."""
        return self._end == _HEAD.size

    def add(self, piece: WeightPiece) -> bool:
        """Add a piece; return False if there is no room for it."""
        if self._end + len(piece.data) + _FIELDS + 2 * _LENGTH.size > len(self._buffer):
            if self.empty:
                raise ValueError(f"a piece of {len(piece.data)} bytes is larger than a bucket")
            return False
        content = piece.SerializeToString()
        _LENGTH.pack_into(self._buffer, self._end, len(content))
        begin = self._end + _LENGTH.size
        self._end = begin + len(content)
        self._buffer[begin : self._end] = content
        self._last = self._last or piece.last
        return True

    def finish(self, acknowledge: int) -> None:
        """End the bucket; every rank is to acknowledge it by this number, unless that is 0."""
        _LENGTH.pack_into(self._buffer, self._end, 0)
        _HEAD.pack_into(self._buffer, 0, acknowledge, self._last)


def head_of(buffer: memoryview) -> tuple[int, bool]:
    """Return the number by which a bucket is to be acknowledged, and True if it is the last one."""
    acknowledge, last = _HEAD.unpack_from(buffer, 0)
    return acknowledge, bool(last)


def pieces_of(buffer: memoryview) -> Iterator[WeightPiece]:
    """Yield the pieces of a bucket. ValueError: it is none."""
    end = _HEAD.size
    while True:
        if end + _LENGTH.size > len(buffer):
            raise ValueError("a bucket has no end")
        (size,) = _LENGTH.unpack_from(buffer, end)
        if not size:
            return
        begin, end = end + _LENGTH.size, end + _LENGTH.size + size
        if end > len(buffer):
            raise ValueError("a piece is longer than its bucket")
        try:
            yield WeightPiece.FromString(bytes(buffer[begin:end]))
        except Exception as error:  # DecodeError of the runtime in use
            raise ValueError(f"a piece cannot be read: {error}") from error
