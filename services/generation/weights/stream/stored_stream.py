"""Stream of a version's bytes in the files of a folder, appended at its end and read at any position."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import sys
import zlib
from contextlib import suppress
from pathlib import Path

from paceline.errors import Violation
from paceline.files import parse_object, read_regular
from paceline.v1 import weight_stream_pb2 as pb
from paceline.weights.pieces import PieceLog, Segment
from paceline.weights.safetensors import INDEX, MOST_INDEX_BYTES, finish_folder, shard_name, unfinished_file
from services.contracts.errors import (
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    ResourceExhausted,
    ServiceError,
)

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# More files than a model has.
_MOST_FILES = 1 << 16


class StoredStream:
    """Bytes of a version. One thread writes at a time, and any number of threads read."""

    def __init__(self, folder: Path, most_bytes: int = sys.maxsize) -> None:
        """Write to an empty folder, whose files have at most `most_bytes`."""
        self.folder = folder
        self._room = most_bytes
        """Bytes that files may still take."""
        self._file_bytes = 0
        """Size of the last file."""
        self._tensors_from = 0
        """Offset in the last file at which its tensors begin."""
        self._next = 0
        """Offset in the last file behind the bytes that came last."""
        self.log = PieceLog()
        self.whole = False
        self._index = bytearray()
        """Bytes of the index so far; it becomes a file only when the stream is complete."""
        self._index_from = sys.maxsize
        """Position at which the index begins."""
        self._files = 0
        """Number of files that have begun."""
        self._descriptor = -1

    @classmethod
    def of_folder(cls, folder: Path) -> StoredStream:
        """Return the stream of a complete folder; OSError or ValueError if it has no index with its files."""
        found = cls(folder)
        content = read_regular(folder / INDEX, MOST_INDEX_BYTES)
        try:
            count = len(parse_object(content)["metadata"]["shards"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"{folder / INDEX} names no files") from error
        for number in range(count):
            with (folder / shard_name(number, count)).open("rb") as file:
                header = 8 + int.from_bytes(file.read(8), "little")
                size = os.fstat(file.fileno()).st_size
            if size > header:
                found.log.append(number, header, size - header)
            found.log.append(number, 0, header)
        found._index_from = found.log.end
        found._index += content
        found.log.append(count, 0, len(content))
        found._files, found.whole = count, True
        return found

    @property
    def complete_files(self) -> int:
        """Number of complete files."""
        return self._files if self._index else max(0, self._files - 1)

    @property
    def checksum(self) -> str:
        """Checksum of the complete weights (see `safetensors.checksum`)."""
        return f"index-sha256:{hashlib.sha256(self._index).hexdigest()}"

    def put(self, piece: pb.WeightPiece) -> None:
        """Append bytes; bytes that are there already are skipped.

        Raises:
            DataLoss: they are not the bytes that were sent.
            InvalidArgument: they are more than the served model can have, or not the next ones of their file.
            FailedPrecondition: earlier bytes are missing.
            ResourceExhausted: the disk is full.
        """
        data = memoryview(piece.data)
        if zlib.crc32(data) != piece.crc:
            raise DataLoss(f"the bytes at position {piece.position} are corrupt")
        known = self.log.end - piece.position
        if known < 0:
            text = f"bytes of position {piece.position} came where {self.log.end} is the next"
            raise FailedPrecondition("NOT_NEXT", text, next=str(self.log.end))
        if self.whole or known >= len(data):
            return
        data, offset = data[known:], piece.offset + known
        if piece.index:
            if (piece.file, offset) != (self._files, len(self._index)):
                wanted = f"{len(self._index)} of file {self._files}"
                raise _misplaced(piece.file, offset, f"the next byte of the index must be {wanted}")
            self._check_room(len(self._index) + len(data), MOST_INDEX_BYTES, "an index")
            self._index_from = min(self._index_from, self.log.end)
            self._index += data
        else:
            self._write(piece.file, offset, data)
        if piece.last:
            self._finish()
        # Only now, so that a reader of the last bytes learns that they are the last.
        self.log.append(piece.file, offset, len(data))

    def read(self, position: int, most: int) -> pb.WeightPiece:
        """Return bytes from a position before the end; OSError if the folder was removed."""
        segment = self.log.at(position, most)
        data = self._content(segment)
        return pb.WeightPiece(
            position=position,
            file=segment.file,
            offset=segment.offset,
            data=data,
            crc=zlib.crc32(data),
            index=position >= self._index_from,
            last=self.whole and segment.end == self.log.end,
        )

    def remove(self) -> None:
        """Remove the folder."""
        self._close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _write(self, file: int, offset: int, data: memoryview) -> None:
        if file not in (self._files - 1, self._files) or self._index or file >= _MOST_FILES:
            raise FailedPrecondition("NOT_NEXT", f"file {file} came where {self._files} is the next")
        held = self._file_bytes if file < self._files else 0
        end = offset + len(data)
        if held and not self._follows(offset, end):
            where = f"from {self._tensors_from} on, then the header in front"
            raise _misplaced(file, offset, f"each byte must come once: the tensors {where}")
        # Holes in a file count as bytes: they cost its sender nothing, but its readers as much.
        size = max(held, end)
        self._check_room(size - held, self._room, "files")
        try:
            if file == self._files:
                self._close()
                path = unfinished_file(self.folder, file)
                self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
                self._files, self._file_bytes = file + 1, 0
            if not held:
                self._tensors_from = offset
            while data:
                written = os.pwrite(self._descriptor, data, offset)
                data, offset = data[written:], offset + written
        except OSError as error:
            raise _refused(self.folder, error) from error
        self._room -= size - held
        self._file_bytes, self._next = size, end

    def _follows(self, offset: int, end: int) -> bool:
        """Return True for the next bytes of the last file: its tensors in their order, then its header.

        So each byte of a file comes once, and the room of the files bounds what is sent and kept in `log`.
        """
        if self._next < self._file_bytes:  # within the header
            return offset == self._next and end <= self._tensors_from
        return offset == self._next or (offset == 0 and end <= self._tensors_from)

    def _check_room(self, wanted: int, room: int, what: str) -> None:
        if wanted > room:
            text = (
                f"{what} of more bytes came than the model that is served can have: {wanted - room} too many"
            )
            raise InvalidArgument([Violation("streamed", text)])

    def _finish(self) -> None:
        self._close()
        try:
            finish_folder(self.folder, self._files, bytes(self._index))
        except OSError as error:
            raise _refused(self.folder, error) from error
        self.whole = True

    def _content(self, segment: Segment) -> bytes:
        if segment.position >= self._index_from:
            return bytes(self._index[segment.offset : segment.offset + segment.size])
        # The folder may be finished or moved meanwhile.
        unfinished, named = unfinished_file(Path(), segment.file), shard_name(segment.file, self._files)
        for name in (unfinished, named, named):
            with suppress(FileNotFoundError), (self.folder / name).open("rb", buffering=0) as file:
                data = os.pread(file.fileno(), segment.size, segment.offset)
                if len(data) == segment.size:
                    return data
        raise FileNotFoundError(f"the weights in {self.folder} were removed")

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _misplaced(file: int, offset: int, allowed: str) -> InvalidArgument:
    return InvalidArgument([Violation("piece.offset", f"is {offset} of file {file}; {allowed}")])


def _refused(folder: Path, error: OSError) -> ServiceError:
    text = f"weights cannot be written to {folder}: {error.strerror}"
    if error.errno in _FULL:
        return ResourceExhausted("disk", text)
    return FailedPrecondition("WEIGHTS_NOT_ADOPTED", text)
