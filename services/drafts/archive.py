"""Snapshots of a store on disk: read at the start, written periodically."""

from __future__ import annotations

import asyncio
import hashlib
import os
import struct
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import structlog
from google.protobuf.message import DecodeError

from paceline.internal.v1 import draft_pb2 as pb
from services.contracts.durable_files import sync
from services.contracts.errors import InvalidArgument
from services.contracts.rollout import StoredRollout
from services.contracts.rollout_messages import batches, from_proto
from services.drafts.metrics import DraftStoreMetrics
from services.drafts.store import DraftStore

log = structlog.get_logger(__name__)

MAGIC = b"PLDRAFTS"
FORMAT = 1

_HEADER = struct.Struct("<8sId")
_LENGTH = struct.Struct("<I")
_DIGEST_BYTES = 32
_CHUNK_BYTES = 1 << 20


class BadSnapshot(Exception):
    """The file is not a snapshot of this format, or is damaged; the message says which."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot whose checksum was verified."""

    path: Path
    at: float
    """Unix time at which it was taken."""

    def rollouts(self) -> Iterator[StoredRollout]:
        """Yield the rollouts in the order written, reading on demand. BadSnapshot if one is invalid."""
        with self.path.open("rb") as file:
            file.seek(_HEADER.size)
            while length := _LENGTH.unpack(file.read(_LENGTH.size))[0]:
                try:
                    block = pb.PutRolloutsRequest.FromString(file.read(length))
                    found = [from_proto(each) for each in block.rollouts]
                except (DecodeError, InvalidArgument) as error:
                    raise BadSnapshot(f"holds something else than rollouts: {error}") from None
                yield from found


def write_snapshot(path: Path, rollouts: Iterable[StoredRollout], at: float) -> None:
    """Replace the file at `path`. If that raises OSError, the old one is still there."""
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
    sync(path.parent)


def open_snapshot(path: Path) -> Snapshot:
    """Verify the whole file. BadSnapshot if it cannot be used, OSError if it cannot be read."""
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


def _write(file: BinaryIO, rollouts: Iterable[StoredRollout], at: float) -> None:
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


class Archive:
    """Snapshots of one store, in one file; without a `path` none are kept."""

    def __init__(self, path: Path | None, store: DraftStore) -> None:
        self.taken_at = 0.0
        """Unix time of the last snapshot, including one found at the start; 0 for none."""
        self._path = path
        self._store = store
        self._changes = store.changes

    def restore(self) -> None:
        """Fill the empty store from the file.

        A file that cannot be used is renamed to *.refused: only the rollouts in it are lost.
        """
        if self._path is None or not self._path.exists():
            return
        try:
            snapshot = open_snapshot(self._path)
            for rollout in snapshot.rollouts():
                self._store.put(rollout)
        except (BadSnapshot, OSError) as error:
            log.error("snapshot_refused", path=str(self._path), error=str(error))
            self._set_aside(self._path)
        else:
            self.taken_at = snapshot.at
            self._changes = self._store.changes
            log.info("snapshot_restored", path=str(self._path), prompts=self._store.prompts)

    async def run(self, interval: float, stopping: asyncio.Event, metrics: DraftStoreMetrics) -> None:
        """Write a snapshot every `interval` seconds until `stopping` is set; one under way is completed."""
        while not stopping.is_set():
            try:
                async with asyncio.timeout(interval):
                    await stopping.wait()
            except TimeoutError:
                await self.take(metrics)

    async def take(self, metrics: DraftStoreMetrics) -> None:
        """Write a snapshot in a thread if something has changed; a failure is logged."""
        changes = self._store.changes
        if self._path is None or changes == self._changes:
            return
        at, began = time.time(), time.perf_counter()
        try:
            # Rollouts are immutable, so a list of them is consistent.
            await asyncio.to_thread(write_snapshot, self._path, list(self._store), at)
        except OSError as error:
            metrics.snapshot_failures.inc()
            log.error("snapshot_failed", path=str(self._path), error=str(error))
            return
        metrics.snapshot_seconds.observe(time.perf_counter() - began)
        self.taken_at, self._changes = at, changes

    def _set_aside(self, path: Path) -> None:
        try:
            path.replace(path.with_name(f"{path.name}.refused"))
        except OSError as error:
            log.error("snapshot_not_set_aside", path=str(path), error=str(error))
