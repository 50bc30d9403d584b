"""Give the pieces of one pass over the weights to several senders, with few of them in memory."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator

import grpc

from paceline.errors import CancelledError
from paceline.v1.weight_stream_pb2 import WeightPiece


class PieceTee:
    """One pass over pieces for several readers, each in a thread of its own. The slowest sets the pace."""

    def __init__(self, readers: int, most_bytes: int) -> None:
        """Keep up to `most_bytes`, and one piece, that some reader has not taken."""
        self._changed = threading.Condition()
        self._most_bytes = most_bytes
        self._queues: list[deque[WeightPiece] | None] = [deque() for _ in range(readers)]
        """What each reader has not taken; None: it wants no more."""
        self._bytes = [0] * readers
        self._over = False
        self._error: Exception | None = None

    def feed(self, pieces: Iterable[WeightPiece]) -> None:
        """Give all pieces to the readers; return when they have room for the last, or want no more.

        An error of the pieces is raised here, and to the readers.
        """
        try:
            for piece in pieces:
                if not self._put(piece):
                    return
                # It may be large, and is not needed while the next one is made.
                del piece
        except Exception as error:
            self._end(error)
            raise
        except BaseException:
            self.stop()
            raise
        self._end(None)

    def stop(self) -> None:
        """End the pass; readers get `CancelledError`."""
        message = "the weights are not sent to the end, because another shard failed"
        self._end(CancelledError(grpc.StatusCode.CANCELLED, message))

    def pieces(self, reader: int) -> Iterator[WeightPiece]:
        """Iterate over the pieces, as one reader; leaving it leaves the pass, which goes on for the others."""
        try:
            while (piece := self._take(reader)) is not None:
                yield piece
        finally:
            with self._changed:
                self._queues[reader] = None
                self._changed.notify_all()

    def _put(self, piece: WeightPiece) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._over or self._fullest() < self._most_bytes)
            if self._over or all(queue is None for queue in self._queues):
                return False
            for reader, queue in enumerate(self._queues):
                if queue is not None:
                    queue.append(piece)
                    self._bytes[reader] += len(piece.data)
            self._changed.notify_all()
            return True

    def _fullest(self) -> int:
        """Return the most bytes that a reader has not taken."""
        reading = zip(self._bytes, self._queues, strict=True)
        return max((size for size, queue in reading if queue is not None), default=0)

    def _take(self, reader: int) -> WeightPiece | None:
        with self._changed:
            queue = self._queues[reader]
            assert queue is not None, "a pass is read once"
            self._changed.wait_for(lambda: queue or self._over)
            if self._error is not None:
                raise self._error
            if not queue:
                return None
            piece = queue.popleft()
            self._bytes[reader] -= len(piece.data)
            self._changed.notify_all()
            return piece

    def _end(self, error: Exception | None) -> None:
        with self._changed:
            if self._error is None:
                self._over, self._error = True, error
            self._changed.notify_all()
