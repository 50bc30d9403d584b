"""Push weights without a shared disk: to one instance, which forwards them to all others.

    with client.run("run-1") as run:
        run.push_weights(model.state_dict())

If that instance dies, the sender continues with another one.
"""

from __future__ import annotations

import hashlib
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import grpc

from paceline import types as t
from paceline.blocking import on_stop
from paceline.calls import GatewayCalls
from paceline.errors import PacelineError, from_rpc, source_read_once, stream_stalled
from paceline.shards import OpenShard
from paceline.transport.channel import Tls, call_metadata
from paceline.v1 import weight_stream_pb2 as pb
from paceline.v1.weight_stream_pb2 import WeightPiece
from paceline.v1.weight_stream_pb2_grpc import WeightStreamServiceStub
from paceline.weights import safetensors
from paceline.weights.pieces import PieceTee, SendWindow, SourceBehind, cut
from paceline.weights.version_push import VersionPush, WeightTransport

_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 1.0
# Refusals that another attempt will not change.
_FINAL = (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.PERMISSION_DENIED)


@dataclass(frozen=True, slots=True)
class WeightStream(WeightTransport):
    """Transport of weights over connections alone: the trainer writes no file, and no disk is shared.

    It is the default transport of a run. The instances need `adopted_weights`, and the trainer must reach them. It
    sends every byte once, whatever the number of instances. A folder that is pushed by its path is read by the
    instances themselves.
    """

    piece_bytes: int = 1 << 20
    """Size of a piece."""
    window_bytes: int = 64 << 20
    """Bytes that are kept until a second instance has them, in case the first one dies."""
    shard_bytes: int = 256 * 10**6
    """Largest file of a version. Each file is checked while the next one arrives."""
    stall_seconds: float = 10.0
    """Seconds without an answer after which an instance counts as lost."""
    give_up_seconds: float = 60.0
    """Seconds without progress after which the push fails."""
    tls: Tls | None = None
    """TLS to the instances, if it differs from the TLS settings of the gateway."""

    async def push(
        self, client: GatewayCalls, push: VersionPush, tensors: safetensors.Tensors, in_flight: t.InFlight
    ) -> t.UpdateFinished:
        """Push tensors, reading them once for all shards, at the pace of the slowest shard.

        PacelineError: AbortedError with the reason SOURCE_READ_ONCE if bytes of an iterator are needed again.
        """
        members = push.shards.members

        def pieces() -> Iterator[WeightPiece]:
            return cut(safetensors.lay_out(tensors, self.shard_bytes), self.piece_bytes)

        def start(member: OpenShard, version: int) -> Awaitable[t.StreamStarted]:
            return member.calls.start_stream(push.run_id, version, push.target, push.push_id)

        async def stage(member: OpenShard, started: t.StreamStarted, first: Iterator[WeightPiece]) -> None:
            again = pieces if isinstance(tensors, Mapping) else None
            checksum = await _send(member.calls, push, self, started, first, again)
            await member.calls.update_streamed(started.update_id, checksum)

        if len(members) == 1:
            return await push.stage(
                start, lambda member, started: stage(member, started, pieces()), in_flight
            )

        tee = PieceTee(len(members), self.window_bytes // 4)

        async def stage_from_tee(member: OpenShard, started: t.StreamStarted) -> None:
            try:
                await stage(member, started, tee.pieces(members.index(member)))
            except BaseException:
                # The other shards must not wait for pieces that will not come.
                tee.stop()
                raise

        def feed() -> Coroutine[Any, Any, None]:
            return client.run_work(lambda: tee.feed(pieces()))

        return await push.stage(start, stage_from_tee, in_flight, feed)


async def _send(
    client: GatewayCalls,
    push: VersionPush,
    stream: WeightStream,
    started: t.StreamStarted,
    first: Iterator[WeightPiece],
    again: Callable[[], Iterator[WeightPiece]] | None,
) -> str:
    """Send all bytes, to one instance after another if one is lost; return their checksum.

    `first` yields the pieces. `again` starts reading them from the beginning; None if the source can be read once
    only.
    """

    def begin(pieces: Iterator[WeightPiece]) -> WeightSender:
        return WeightSender(pieces, stream.window_bytes, stream.stall_seconds)

    sender, reached, progress_at, pause = begin(first), 0, time.monotonic(), _FIRST_PAUSE
    while True:
        try:
            await client.run_work(partial(_attempt, client, stream, sender, started))
            return sender.checksum
        except SourceBehind as behind:
            if again is None:
                raise source_read_once(str(behind)) from behind
            sender = begin(again())
            error: PacelineError = source_read_once(str(behind))
        except grpc.RpcError as failed:
            error = from_rpc(failed)
            if error.code in _FINAL:
                raise error from failed
        except SendStalled as stalled:
            error = stream_stalled(str(stalled))
        except BaseException:
            sender.stop()
            raise
        if sender.reached > reached:
            reached, progress_at, pause = sender.reached, time.monotonic(), _FIRST_PAUSE
        if time.monotonic() - progress_at > stream.give_up_seconds or not await client.sleep(pause):
            raise error
        pause = min(_LONGEST_PAUSE, 2 * pause)
        started = await client.start_stream(push.run_id, started.version, push.target, push.push_id)


def _attempt(
    client: GatewayCalls, stream: WeightStream, sender: WeightSender, started: t.StreamStarted
) -> None:
    channel = client.dial(started.address, stream.tls)
    try:
        with on_stop(sender.stop):
            sender.send(channel, started.ticket)
    finally:
        channel.close()


class SendStalled(Exception):
    """Raised when an instance does not answer any more."""


class WeightSender:
    """Sender of the pieces of a version. Call `send`, in one thread at a time, until it returns."""

    def __init__(self, pieces: Iterator[pb.WeightPiece], window_bytes: int, stall_seconds: float) -> None:
        """Keep up to `window_bytes` that no second instance has; wait up to `stall_seconds` for an answer."""
        self.reached = 0
        """Position behind the bytes that at least one instance has."""
        self._pieces = pieces
        self._window_bytes = window_bytes
        self._stall_seconds = stall_seconds
        self._window = SendWindow()
        self._index = hashlib.sha256()
        self._call: _PushCall | None = None
        self._stopped = False

    @property
    def checksum(self) -> str:
        """Checksum of the version (see `safetensors.checksum`), valid once all pieces were sent."""
        return f"index-sha256:{self._index.hexdigest()}"

    def stop(self) -> None:
        """Make `send` raise; may be called in any thread."""
        self._stopped = True
        if self._call is not None:
            self._call.cancel()

    def send(self, channel: grpc.Channel, ticket: str) -> None:
        """Send to an instance the bytes that it does not have yet, until all are confirmed.

        Raises:
            grpc.RpcError: the instance refused or is lost; call `send` again with a channel to another one.
            SendStalled: as well.
            SourceBehind: the instance needs bytes that are no longer kept.
        """
        with _PushCall(channel, ticket, self._stall_seconds) as self._call:
            call = self._call
            if self._stopped:
                raise SendStalled("the push of the weights was stopped")
            position = call.begin()
            for piece in self._window.since(position):
                call.put(piece)
            for piece in self._pieces:
                if piece.index:
                    self._index.update(piece.data)
                self._window.add(piece)
                end = piece.position + len(piece.data)
                if end > position:
                    call.put(piece)
                del piece
                self._drop(call, self._window_bytes)
            call.finish()
            self._drop(call, 0)

    def _drop(self, call: _PushCall, most: int) -> None:
        """Drop confirmed pieces; wait until at most `most` bytes are kept."""
        while True:
            self._window.confirm(call.confirmed())
            self.reached = max(self.reached, call.received)
            if self._window.bytes <= most:
                return
            call.wait()


class _PushCall:
    """One call of PushWeights; a separate thread reads the answers."""

    def __init__(self, channel: grpc.Channel, ticket: str, stall_seconds: float) -> None:
        self.received = 0
        self._confirmed = 0
        self._stall_seconds = stall_seconds
        self._changed = threading.Condition()
        self._answers = 0
        self._awaited = 0
        self._error: grpc.RpcError | None = None
        self._over = False
        self._queue: queue.SimpleQueue[pb.WeightPiece | None] = queue.SimpleQueue()
        stub = WeightStreamServiceStub(channel)  # type: ignore[no-untyped-call]
        self._call: Any = stub.PushWeights(self._requests(), metadata=call_metadata(ticket))
        self._reader = threading.Thread(target=self._read, name="paceline-weights", daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._queue.put(None)
        self._call.cancel()
        self._reader.join()

    def cancel(self) -> None:
        self._call.cancel()

    def begin(self) -> int:
        """Return the position from which the instance wants bytes."""
        self.wait()
        return self.received

    def put(self, piece: pb.WeightPiece) -> None:
        self._queue.put(piece)

    def finish(self) -> None:
        """End the requests: no piece follows."""
        self._queue.put(None)

    def confirmed(self) -> int:
        """Return the position before which no piece needs to be kept. Raises the call's error."""
        if self._error is not None:
            raise self._error
        return self._confirmed

    def wait(self) -> None:
        """Wait for the next answer. SendStalled: none comes in time; an error of the call is raised as it is."""
        deadline = time.monotonic() + self._stall_seconds
        with self._changed:
            while self._answers == self._awaited and self._error is None:
                if self._over:
                    raise SendStalled("the instance ended the call before all was confirmed")
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise SendStalled(f"the instance has not answered for {self._stall_seconds:g} s")
            self._awaited = self._answers
        if self._error is not None:
            raise self._error

    def _requests(self) -> Iterator[pb.PushWeightsRequest]:
        # A request copies its piece. It is made only when gRPC can send it, so that a waiting piece is not in
        # memory twice.
        for piece in iter(self._queue.get, None):
            yield pb.PushWeightsRequest(piece=piece)

    def _read(self) -> None:
        try:
            for answer in self._call:
                with self._changed:
                    self.received, self._confirmed = answer.received, answer.confirmed
                    self._answers += 1
                    self._changed.notify_all()
        except grpc.RpcError as error:
            with self._changed:
                self._error = error
        finally:
            with suppress(RuntimeError), self._changed:
                self._over = True
                self._changed.notify_all()
