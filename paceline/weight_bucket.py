"""Buckets: the pieces of a version's stream that one broadcast carries. Pure.

A bucket begins with a request for acknowledgement (a number, 0 for none) and a mark of the last bucket. Pieces
follow, each after its length; a length of zero ends them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from paceline.v1.weight_stream_pb2 import WeightPiece

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
