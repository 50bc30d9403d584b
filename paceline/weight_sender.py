"""Send the bytes of a version to an instance, and go on at another one where the first has died."""

from __future__ import annotations

import hashlib
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Self

import grpc

from paceline.channel import call_metadata
from paceline.send_window import SendWindow
from paceline.v1 import weight_stream_pb2 as pb
from paceline.v1.weight_stream_pb2_grpc import WeightStreamServiceStub


class SendStalled(Exception):
    """Raised when an instance says nothing any more."""


class WeightSender:
    """One pass over the pieces of a version. `send` is called in one thread at a time, until it returns."""

    def __init__(self, pieces: Iterator[pb.WeightPiece], window_bytes: int, stall_seconds: float) -> None:
        """Keep up to `window_bytes` that no second instance has, and wait so long for a sign of life."""
        self.reached = 0
        """Position behind the bytes that some instance has."""
        self._pieces = pieces
        self._window_bytes = window_bytes
        self._stall_seconds = stall_seconds
        self._window = SendWindow()
        self._index = hashlib.sha256()
        self._link: _Link | None = None
        self._stopped = False

    @property
    def checksum(self) -> str:
        """Checksum of what was sent (see `safetensors.checksum`), once all of it was."""
        return f"index-sha256:{self._index.hexdigest()}"

    def stop(self) -> None:
        """End `send`, which raises; may be called in any thread."""
        self._stopped = True
        if self._link is not None:
            self._link.cancel()

    def send(self, channel: grpc.Channel, ticket: str) -> None:
        """Send to an instance, from what it has on, until all need not be kept any more.

        Raises:
            grpc.RpcError: the instance refused or is lost; call it again with a channel to another one.
            SendStalled: as well.
            SourceBehind: the instance needs bytes that are kept no more.
        """
        with _Link(channel, ticket, self._stall_seconds) as self._link:
            link = self._link
            if self._stopped:
                raise SendStalled("the weights are not to be sent any more")
            position = link.begin()
            for piece in self._window.since(position):
                link.put(piece)
            for piece in self._pieces:
                if piece.index:
                    self._index.update(piece.data)
                self._window.add(piece)
                end = piece.position + len(piece.data)
                if end > position:
                    link.put(piece)
                del piece
                self._drop(link, self._window_bytes)
            link.finish()
            self._drop(link, 0)

    def _drop(self, link: _Link, most: int) -> None:
        """Drop what is confirmed; wait until no more than `most` bytes are kept."""
        while True:
            self._window.confirm(link.confirmed())
            self.reached = max(self.reached, link.received)
            if self._window.bytes <= most:
                return
            link.wait()


class _Link:
    """One call of PushWeights; a thread of its own reads the answers."""

    def __init__(self, channel: grpc.Channel, ticket: str, stall_seconds: float) -> None:
        self.received = 0
        self._confirmed = 0
        self._stall_seconds = stall_seconds
        self._changed = threading.Condition()
        self._answers = 0
        self._seen = 0
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
        """Return the position from which on the instance wants bytes."""
        self.wait()
        return self.received

    def put(self, piece: pb.WeightPiece) -> None:
        self._queue.put(piece)

    def finish(self) -> None:
        """Say that nothing follows."""
        self._queue.put(None)

    def confirmed(self) -> int:
        """Return the position before which nothing needs to be kept. Raises the call's error."""
        if self._error is not None:
            raise self._error
        return self._confirmed

    def wait(self) -> None:
        """Wait for an answer that was not waited for yet. SendStalled: none comes; or raise the call's error."""
        deadline = time.monotonic() + self._stall_seconds
        with self._changed:
            while self._answers == self._seen and self._error is None:
                if self._over:
                    raise SendStalled("the instance ended the call before all was confirmed")
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise SendStalled(f"the instance has not answered for {self._stall_seconds:g} s")
            self._seen = self._answers
        if self._error is not None:
            raise self._error

    def _requests(self) -> Iterator[pb.PushWeightsRequest]:
        # A request copies its piece, so it is made when gRPC can send it: what waits is in memory once.
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
