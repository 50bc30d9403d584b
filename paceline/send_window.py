"""Bytes of a stream that were sent and may have to be sent again, to another instance. Pure."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterable, Iterator

from paceline.safetensors import FileWrite
from paceline.v1.weight_stream_pb2 import WeightPiece


def cut(writes: Iterable[FileWrite], piece_bytes: int) -> Iterator[WeightPiece]:
    """Yield what is written as pieces, which hold the bytes of one file and are as large as may be."""
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
            # It keeps its tensor in memory.
            del data
        del write
    # The index came last, and is not held.


class SourceBehind(Exception):
    """Raised when bytes are needed that are kept no more."""


class SendWindow:
    """Pieces that are not confirmed, in order."""

    def __init__(self) -> None:
        self.begin = 0
        """Position before which nothing is kept."""
        self.end = 0
        """Position behind the last piece."""
        self._pieces: deque[WeightPiece] = deque()

    @property
    def bytes(self) -> int:
        """Bytes that are kept."""
        return self.end - self.begin

    def add(self, piece: WeightPiece) -> None:
        """Keep a piece, which is the next."""
        self._pieces.append(piece)
        self.end = piece.position + len(piece.data)

    def confirm(self, position: int) -> None:
        """Drop the pieces before a position."""
        while self._pieces and self._pieces[0].position + len(self._pieces[0].data) <= position:
            self._pieces.popleft()
        self.begin = self._pieces[0].position if self._pieces else self.end

    def since(self, position: int) -> Iterator[WeightPiece]:
        """Yield what is kept from a position on. SourceBehind: that is before what is kept."""
        if position < self.begin:
            raise SourceBehind(f"position {position} is asked for; {self.begin} is the first that is kept")
        for piece in list(self._pieces):
            # One that the other side has in part is whole again: it skips what it has.
            if piece.position + len(piece.data) > position:
                yield piece
