"""Protocol between the ranks of a weight broadcast: the rendezvous, and the buckets that they exchange.

A broadcast is done in rounds, each with its own process group. An instance that is ready for a round reports the
position behind the bytes that it has; the trainer, which is rank 0, then names the ranks of the round. When a rank
fails, the round is lost for all ranks, and the remaining ones meet for the next round. Every wait has a limit.

Only `TrainerRendezvous.host`, `InstanceRendezvous.join` and the process groups import torch.
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

SMALLEST_BUCKET = 64 << 10
"""Bytes of the smallest bucket."""
_ACKNOWLEDGEMENT_POLL_SECONDS = 0.002
# A bucket has the number by which ranks acknowledge it (0: not at all) and the mark of the last bucket, then each
# piece of the stream after its length. A length of zero ends the pieces.
_HEAD = struct.Struct("<QB")
_LENGTH = struct.Struct("<I")
# Most bytes that a piece needs in addition to its data.
_FIELD_BYTES = 64


class RankGone(Exception):
    """Raised when another rank failed, is gone, or is slower than the limit."""


class TrainerGone(RankGone):
    """Raised when the trainer, which hosts the store, is gone."""


class SlowRanks(RankGone):
    """Raised when ranks are slower than the limit; `instance_ids` names them."""

    def __init__(self, text: str, instance_ids: Sequence[str]) -> None:
        super().__init__(text)
        self.instance_ids = tuple(instance_ids)


class NotOfRound(Exception):
    """Raised on an instance that the trainer left out, or when the trainer has given up the broadcast."""


@dataclass(frozen=True, slots=True)
class RoundRanks:
    """Instances that take part in a round, in the order of their ranks from 1 on."""

    number: int
    instance_ids: tuple[str, ...]

    @property
    def size(self) -> int:
        """Number of ranks, including the trainer's rank 0."""
        return len(self.instance_ids) + 1


class _Rendezvous:
    """Keys of one broadcast in a store (torch.distributed.TCPStore) of the trainer.

    Keys that instances write:

        ready/<round>/<instance>  position behind the bytes that it has; it waits for the round
        has/<round>/<instance>    position that it acknowledged last
        acks/<round>/<number>     count of ranks that acknowledged this number
        complete/<instance>       it has all bytes
        gone/<instance>           reason why it takes no part any more

    The trainer writes `round/<round>`: the ranks of the round, or the reason why there are no more rounds. Both
    sides may write `lost/<round>`, the reason why a round is lost.
    """

    def __init__(self, store: Any, keys: Any, host: str, described: CollectiveRendezvous) -> None:
        self.described = described
        self.stall_seconds = described.stall.ToTimedelta().total_seconds()
        self.join_seconds = described.join.ToTimedelta().total_seconds()
        self._store = store
        self._keys = keys
        self._host = host

    def lose_round(self, number: int, reason: str) -> None:
        """Declare a round lost."""
        with suppress(RuntimeError):
            self._keys.set(f"lost/{number}", reason)

    def _group(self, ranks: RoundRanks, rank: int) -> Any:
        from torch.distributed import PrefixStore, ProcessGroupGloo

        options = ProcessGroupGloo._Options()
        # Use the interface of `host`, not the one to which this machine's name resolves. Connections are made when
        # they are needed, because a mesh of all ranks would have a million.
        options._devices = [ProcessGroupGloo.create_device(hostname=self._host, lazy_init=True)]
        options._timeout = timedelta(seconds=self.stall_seconds)
        with round_lives():
            return ProcessGroupGloo(
                PrefixStore(f"group/{ranks.number}", self._keys), rank, ranks.size, options
            )


class TrainerRendezvous(_Rendezvous):
    """The trainer's side of a rendezvous. Methods that raise RankGone return within the limits."""

    def __init__(self, store: Any, keys: Any, host: str, described: CollectiveRendezvous) -> None:
        super().__init__(store, keys, host, described)
        self._next_round = 0

    @classmethod
    def host(cls, address: str, port: int, described: CollectiveRendezvous) -> Self:
        """Open the store at an address of this machine, and set it in `described`.

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

    def present(self, number: int, instance_ids: Iterable[str]) -> dict[str, int]:
        """Return the instances that are ready for a round, with the positions behind the bytes that they have."""
        with _store_lives():
            keys = {each: f"ready/{number}/{each}" for each in instance_ids}
            return {each: int(self._keys.get(key)) for each, key in keys.items() if self._keys.check([key])}

    def gone(self, instance_ids: Iterable[str]) -> dict[str, str]:
        """Return the instances that ended with an error, with their reasons."""
        with _store_lives():
            keys = {each: f"gone/{each}" for each in instance_ids}
            return {each: _text(self._keys.get(key)) for each, key in keys.items() if self._keys.check([key])}

    def complete(self, instance_ids: Iterable[str]) -> set[str]:
        """Return the instances that have all bytes and join no further round."""
        with _store_lives():
            return {each for each in instance_ids if self._keys.check([f"complete/{each}"])}

    def open_round(self, ranks: RoundRanks) -> Any:
        """Name the ranks of a round, and return its process group, of which this process is rank 0."""
        with _store_lives():
            self._keys.set(f"round/{ranks.number}", json.dumps({"ranks": ranks.instance_ids}))
        self._next_round = ranks.number + 1
        return self._group(ranks, 0)

    def close(self, reason: str) -> None:
        """Announce that there are no more rounds."""
        with suppress(RuntimeError):
            self._keys.set(f"round/{self._next_round}", json.dumps({"over": reason}))

    def await_acknowledged(self, ranks: RoundRanks, acknowledgement: int, position: int) -> None:
        """Wait until all ranks have the bytes before a position.

        Raises:
            SlowRanks: some ranks do not have them within the limit; it names them.
            RankGone: the round is lost.
        """
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
            time.sleep(_ACKNOWLEDGEMENT_POLL_SECONDS)

    def check(self, ranks: RoundRanks) -> None:
        """Raise RankGone if a rank has declared this round lost."""
        with _store_lives():
            if self._keys.check([f"lost/{ranks.number}"]):
                raise RankGone(_text(self._keys.get(f"lost/{ranks.number}")))

    def _position(self, ranks: RoundRanks, instance_id: str) -> int:
        key = f"has/{ranks.number}/{instance_id}"
        with _store_lives():
            return int(self._keys.get(key)) if self._keys.check([key]) else 0


class InstanceRendezvous(_Rendezvous):
    """An instance's side of a rendezvous. Methods that raise RankGone return within the limits."""

    def __init__(
        self, store: Any, keys: Any, host: str, described: CollectiveRendezvous, instance_id: str
    ) -> None:
        super().__init__(store, keys, host, described)
        self.instance_id = instance_id

    @classmethod
    def join(cls, described: CollectiveRendezvous, instance_id: str) -> Self:
        """Connect to the trainer's store. RankGone: it cannot be reached."""
        from torch.distributed import PrefixStore, TCPStore

        host, _, port = described.address.rpartition(":")
        host = host.strip("[]")
        try:
            own = local_address(described.address)
            limit = described.stall.ToTimedelta()
            store = TCPStore(host, int(port), is_master=False, timeout=limit, wait_for_workers=False)
        except (RuntimeError, OSError) as error:
            text = f"the store of the trainer at {described.address} cannot be reached"
            raise RankGone(f"{text}: {_first_line(error)}") from error
        return cls(store, PrefixStore(described.key, store), own, described, instance_id)

    def enter_round(self, number: int, position: int) -> tuple[RoundRanks, Any]:
        """Report the position behind the bytes of this instance, and wait for a round.

        Returns its ranks, and the process group in which this instance is one of them.

        Raises:
            TrainerGone: the trainer is gone.
            RankGone: the round was lost before it began.
            NotOfRound: this instance is not among the ranks.
        """
        with _store_lives():
            self._keys.set(f"ready/{number}/{self.instance_id}", str(position))
            # The trainer waits for others meanwhile.
            self._keys.wait(
                [f"round/{number}"], timedelta(seconds=self.join_seconds + 3 * self.stall_seconds)
            )
            content = self._keys.get(f"round/{number}")
        try:
            announced = parse_object(content)
            if "over" in announced:
                raise NotOfRound(f"the trainer ended the broadcast: {announced['over']}")
            ranks = RoundRanks(number, tuple(map(str, announced["ranks"])))
        except (ValueError, KeyError, TypeError) as error:
            raise NotOfRound(f"the trainer's entry for round {number} cannot be read: {error!r}") from error
        if self.instance_id not in ranks.instance_ids:
            raise NotOfRound(f"{self.instance_id} was not ready in time, and was left out of round {number}")
        return ranks, self._group(ranks, ranks.instance_ids.index(self.instance_id) + 1)

    def acknowledge(self, ranks: RoundRanks, acknowledgement: int, position: int) -> None:
        """Report that this instance has the bytes before a position."""
        with _store_lives():
            self._keys.set(f"has/{ranks.number}/{self.instance_id}", str(position))
            self._keys.add(f"acks/{ranks.number}/{acknowledgement}", 1)

    def finish(self) -> None:
        """Report that this instance has all bytes."""
        with suppress(RuntimeError):
            self._keys.set(f"complete/{self.instance_id}", "")

    def leave(self, number: int, reason: str) -> None:
        """Take no further part, so that no other rank waits for this instance; the current round is lost."""
        with suppress(RuntimeError):
            self._keys.set(f"gone/{self.instance_id}", reason)
        self.lose_round(number, f"{self.instance_id}: {reason}")


def local_address(peer: str) -> str:
    """Return the address from which this machine reaches a peer, `host:port`. OSError: it cannot be reached."""
    host, _, port = peer.rpartition(":")
    family, _, _, _, to = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # Nothing is sent: the kernel chooses the route.
        probe.connect(to)
        return str(probe.getsockname()[0])


@contextmanager
def round_lives() -> Iterator[None]:
    """Turn an error of a process group into RankGone."""
    try:
        yield
    except RuntimeError as error:
        raise RankGone(_first_line(error)) from error


@contextmanager
def _store_lives() -> Iterator[None]:
    """Turn an error of the store into TrainerGone, because the trainer hosts it."""
    try:
        yield
    except RuntimeError as error:
        raise TrainerGone(f"the trainer's store does not answer: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    """Return the first line of an error: torch appends its stack."""
    return (str(error).splitlines() or [repr(error)])[0][:300]


def _text(value: bytes) -> str:
    return value.decode(errors="replace")


def most_piece_bytes(bucket_bytes: int) -> int:
    """Return the largest piece to cut for buckets of this size, so that several fit into one."""
    return min(1 << 20, bucket_bytes // 4)


class BucketWriter:
    """Writer of one bucket into a buffer of bytes, from its beginning."""

    def __init__(self, buffer: memoryview) -> None:
        self._buffer = buffer
        self._end = _HEAD.size
        self._last = False

    @property
    def empty(self) -> bool:
        """True while the bucket has no piece."""
        return self._end == _HEAD.size

    def add(self, piece: WeightPiece) -> bool:
        """Add a piece; return False if there is no room for it."""
        if self._end + len(piece.data) + _FIELD_BYTES + 2 * _LENGTH.size > len(self._buffer):
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
        """End the bucket. With a number other than 0 every rank must acknowledge the bucket by it."""
        _LENGTH.pack_into(self._buffer, self._end, 0)
        _HEAD.pack_into(self._buffer, 0, acknowledge, self._last)


def head_of(buffer: memoryview) -> tuple[int, bool]:
    """Return the number by which ranks must acknowledge a bucket (0: not at all), and True for the last bucket."""
    acknowledge, last = _HEAD.unpack_from(buffer, 0)
    return acknowledge, bool(last)


def pieces_of(buffer: memoryview) -> Iterator[WeightPiece]:
    """Yield the pieces of a bucket. ValueError: the buffer holds no valid bucket."""
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
