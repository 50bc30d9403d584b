"""The file that holds a store's rollouts: written as a whole or not at all, and checked before it is believed.

    magic (8 bytes), format (uint32), time (float64, unix seconds)
    blocks: length (uint32), that many bytes of a PutRolloutsRequest
    length 0
    BLAKE2b-256 of everything before

Numbers are little-endian.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from google.protobuf.message import DecodeError

from paceline.internal.v1 import draft_pb2 as pb
from services.drafts.convert import batches, from_proto
from services.drafts.rollout import Rollout
from services.platform.errors import InvalidArgument

MAGIC = b"PLDRAFTS"
FORMAT = 1

_HEADER = struct.Struct("<8sId")
_LENGTH = struct.Struct("<I")
_DIGEST_BYTES = 32
_CHUNK_BYTES = 1 << 20


class BadSnapshot(Exception):
    """The file is not a snapshot of ours, or is damaged; the message says which."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot that was found sound."""

    path: Path
    at: float
    """When it was taken, in unix seconds."""

    def rollouts(self) -> Iterator[Rollout]:
        """What it holds, in the order written, read as it goes. BadSnapshot when something is not valid."""
        with self.path.open("rb") as file:
            file.seek(_HEADER.size)
            while length := _LENGTH.unpack(file.read(_LENGTH.size))[0]:
                try:
                    block = pb.PutRolloutsRequest.FromString(file.read(length))
                    found = [from_proto(each) for each in block.rollouts]
                except (DecodeError, InvalidArgument) as error:
                    raise BadSnapshot(f"holds something else than rollouts: {error}") from None
                yield from found


def write_snapshot(path: Path, rollouts: Iterable[Rollout], at: float) -> None:
    """Replaces the file at `path`. OSError when it cannot be written; the old one is then still there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("wb") as file:
            _write(file, rollouts, at)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def open_snapshot(path: Path) -> Snapshot:
    """Checks the whole file. BadSnapshot when it cannot be used, OSError when it cannot be read."""
    with path.open("rb") as file:
        header = file.read(_HEADER.size)
        if len(header) < _HEADER.size or not header.startswith(MAGIC):
            raise BadSnapshot("is not a snapshot of a draft store")
        _, written, at = _HEADER.unpack(header)
        if written != FORMAT:
            raise BadSnapshot(f"has format {written}; this version reads {FORMAT}")
        left = os.fstat(file.fileno()).st_size - _HEADER.size - _DIGEST_BYTES
        digest = hashlib.blake2b(header, digest_size=_DIGEST_BYTES)
        while left > 0 and (chunk := file.read(min(left, _CHUNK_BYTES))):
            digest.update(chunk)
            left -= len(chunk)
        if file.read() != digest.digest():
            raise BadSnapshot("is damaged: its checksum does not match")
    return Snapshot(path, at)


def _write(file: BinaryIO, rollouts: Iterable[Rollout], at: float) -> None:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)

    def write(part: bytes) -> None:
        digest.update(part)
        file.write(part)

    write(_HEADER.pack(MAGIC, FORMAT, at))
    for batch in batches(rollouts):
        block = pb.PutRolloutsRequest(rollouts=batch).SerializeToString()
        write(_LENGTH.pack(len(block)))
        write(block)
    write(_LENGTH.pack(0))
    file.write(digest.digest())


def _sync_folder(folder: Path) -> None:
    """Makes the renaming last."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
