"""Pieces of the stream of a version: cut from its files, kept until confirmed, and shared by several senders.

`SendWindow` keeps the pieces that may have to be sent again, to another instance. `PieceTee` reads the weights
once for all shards. `PieceLog` maps positions of the stream to places in files.
"""

from __future__ import annotations

import threading
import zlib
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import grpc

from paceline.errors import CancelledError
from paceline.v1.weight_stream_pb2 import WeightPiece
from paceline.weights.safetensors import FileWrite


def cut(writes: Iterable[FileWrite], piece_bytes: int) -> Iterator[WeightPiece]:
    """Combine writes to pieces of up to `piece_bytes`; a piece has bytes of one file."""
    held, first, position = bytearray(), FileWrite(0, 0, b""), 0

    def piece(data: bytes | bytearray | memoryview, last: bool = False) -> WeightPiece:
        nonlocal position
        content = bytes(data)
        made = WeightPiece(
            position=position,
            file=first.file,
            offset=first.offset,
            data=content,
            crc=zlib.crc32(content),
            index=first.index,
            last=last,
        )
        position += len(content)
        return made

    for write in writes:
        file, index, size = write.file, write.index, len(write.content)
        follows = file == first.file and write.offset == first.offset + len(held)
        if held and not (follows and len(held) + size <= piece_bytes):
            yield piece(held)
            held.clear()
        if held:
            held += write.content
            continue
        for start in range(0, size, piece_bytes):
            data = memoryview(write.content)[start : start + piece_bytes]
            first = FileWrite(file, write.offset + start, b"", index)
            if index or len(data) == piece_bytes:
                yield piece(data, last=index and start + len(data) == size)
            else:
                held += data
            # The slice keeps its tensor in memory.
            del data
        del write
    # Nothing is held here: the index comes last, and is yielded at once.


class SourceBehind(Exception):
    """Raised when bytes are needed that are no longer kept."""


class SendWindow:
    """Unconfirmed pieces, in order."""

    def __init__(self) -> None:
        self.begin = 0
        """Position before which no piece is kept."""
        self.end = 0
        """Position behind the last piece."""
        self._pieces: deque[WeightPiece] = deque()

    @property
    def bytes(self) -> int:
        """Number of bytes that are kept."""
        return self.end - self.begin

    def add(self, piece: WeightPiece) -> None:
        """Keep the next piece."""
        self._pieces.append(piece)
        self.end = piece.position + len(piece.data)

    def confirm(self, position: int) -> None:
        """Drop the pieces before a position."""
        while self._pieces and self._pieces[0].position + len(self._pieces[0].data) <= position:
            self._pieces.popleft()
        self.begin = self._pieces[0].position if self._pieces else self.end

    def since(self, position: int) -> Iterator[WeightPiece]:
        """Yield the kept pieces from a position on. SourceBehind: the position is before the first of them."""
        if position < self.begin:
            raise SourceBehind(f"position {position} is needed; the first that is kept is {self.begin}")
        for piece in list(self._pieces):
            # A partly received piece is resent whole: the receiver skips the bytes that it has.
            if piece.position + len(piece.data) > position:
                yield piece


class PieceTee:
    """Distributor of pieces to several readers, each in its own thread. The slowest reader sets the pace."""

    def __init__(self, readers: int, most_bytes: int) -> None:
        """Keep up to `most_bytes`, plus one piece, that some reader has not taken yet."""
        self._changed = threading.Condition()
        self._most_bytes = most_bytes
        self._queues: list[deque[WeightPiece] | None] = [deque() for _ in range(readers)]
        """Pieces that each reader has not taken yet; None for a reader that wants no more."""
        self._bytes = [0] * readers
        self._over = False
        self._error: Exception | None = None

    def feed(self, pieces: Iterable[WeightPiece]) -> None:
        """Distribute all pieces; return when the last one is queued for the readers, or when they want no more.

        An error of the iterable is raised here, and to the readers.
        """
        try:
            for piece in pieces:
                if not self._put(piece):
                    return
                # A piece may be large, and is not needed while the next one is made.
                del piece
        except Exception as error:
            self._end(error)
            raise
        except BaseException:
            self.stop()
            raise
        self._end(None)

    def stop(self) -> None:
        """Stop distributing; readers get `CancelledError`."""
        message = "the weights are not sent to the end, because another shard failed"
        self._end(CancelledError(grpc.StatusCode.CANCELLED, message))

    def pieces(self, reader: int) -> Iterator[WeightPiece]:
        """Iterate over the pieces as one reader; a reader that leaves early does not affect the others."""
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
        """Return the bytes that wait for the slowest reader."""
        reading = zip(self._bytes, self._queues, strict=True)
        return max((size for size, queue in reading if queue is not None), default=0)

    def _take(self, reader: int) -> WeightPiece | None:
        with self._changed:
            queue = self._queues[reader]
            assert queue is not None, "each reader reads once"
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


@dataclass(frozen=True, slots=True)
class Segment:
    """Bytes of one file that are consecutive in the stream, too; `position` is where they begin there."""

    position: int
    file: int
    offset: int
    size: int

    @property
    def end(self) -> int:
        """Position behind the segment."""
        return self.position + self.size


class PieceLog:
    """Log of the received bytes, from position 0 on without holes. It has two or three segments per file."""

    def __init__(self) -> None:
        self._segments: list[Segment] = []
        self._starts: list[int] = []

    @property
    def end(self) -> int:
        """Position behind the last byte."""
        return self._segments[-1].end if self._segments else 0

    def append(self, file: int, offset: int, size: int) -> None:
        """Append bytes of a file to the log."""
        last = self._segments[-1] if self._segments else None
        if last is not None and last.file == file and last.offset + last.size == offset:
            self._segments[-1] = Segment(last.position, file, last.offset, last.size + size)
            return
        self._starts.append(self.end)
        self._segments.append(Segment(self.end, file, offset, size))

    def at(self, position: int, most: int) -> Segment:
        """Return up to `most` bytes of one segment from a position on, which must be before the end."""
        segment = self._segments[bisect_right(self._starts, position) - 1]
        skipped = position - segment.position
        size = min(most, segment.size - skipped)
        return Segment(position, segment.file, segment.offset + skipped, size)
