"""Places in the stream of a version's bytes: which bytes of which file are at which position. Pure.

The stream is the bytes of the files in the order in which they are written (`safetensors.lay_out`). A position
counts them, so that whoever has the bytes before a position can go on from it with bytes from anybody.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Segment:
    """Bytes of one file that follow each other in the stream, too. `position` is that of the first one."""

    position: int
    file: int
    offset: int
    size: int

    @property
    def end(self) -> int:
        """Position behind the segment."""
        return self.position + self.size


class PieceLog:
    """Log of the bytes that are there, from position 0 on without holes. It has two or three segments a file."""

    def __init__(self) -> None:
        self._segments: list[Segment] = []
        self._starts: list[int] = []

    @property
    def end(self) -> int:
        """Position behind the last byte."""
        return self._segments[-1].end if self._segments else 0

    def append(self, file: int, offset: int, size: int) -> None:
        """Add bytes of a file; they are at the log's end."""
        last = self._segments[-1] if self._segments else None
        if last is not None and last.file == file and last.offset + last.size == offset:
            self._segments[-1] = Segment(last.position, file, last.offset, last.size + size)
            return
        self._starts.append(self.end)
        self._segments.append(Segment(self.end, file, offset, size))

    def at(self, position: int, most: int) -> Segment:
        """Return up to `most` bytes of one segment from a position on, which is before the end."""
        segment = self._segments[bisect_right(self._starts, position) - 1]
        skipped = position - segment.position
        size = min(most, segment.size - skipped)
        return Segment(position, segment.file, segment.offset + skipped, size)
