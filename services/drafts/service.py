"""One replica of the draft store: its servicer, its snapshots on disk, and its metrics.

The servicer translates between the protocol and the store. A snapshot is read at the start and written
periodically. It has a checksum; a damaged file is set aside.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import struct
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import grpc
import structlog
from google.protobuf.message import DecodeError
from prometheus_client import CollectorRegistry

from paceline.errors import Violation
from paceline.files import sync
from paceline.internal.v1 import draft_pb2 as pb
from paceline.internal.v1 import draft_pb2_grpc as rpc
from paceline.times import timestamp
from services.contracts.errors import InvalidArgument
from services.contracts.rollout import KINDS, RolloutKind, StoredRollout, batches, from_proto
from services.drafts.store import Cause, DraftStore
from services.platform.observability.metrics import MetricSet, counter, gauge, histogram

log = structlog.get_logger(__name__)

_SNAPSHOT_SECONDS = (0.01, 0.05, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60)
SNAPSHOT_MAGIC = b"PLDRAFTS"
SNAPSHOT_FORMAT = 1
_SNAPSHOT_HEADER = struct.Struct("<8sId")
_BLOCK_LENGTH = struct.Struct("<I")
_DIGEST_BYTES = 32
_CHUNK_BYTES = 1 << 20
Context = grpc.aio.ServicerContext[Any, Any]


class DraftService(rpc.DraftServiceServicer):
    """DraftService of one replica."""

    def __init__(self, store: DraftStore, archive: Archive, metrics: DraftStoreMetrics) -> None:
        self._store = store
        self._archive = archive
        self._metrics = metrics

    async def PutRollouts(
        self, request_iterator: AsyncIterator[pb.PutRolloutsRequest], context: Context
    ) -> pb.PutRolloutsResponse:
        """Store rollouts message by message; an invalid one ends the call, and earlier ones stay stored."""
        response = pb.PutRolloutsResponse()
        seen = 0
        async for request in request_iterator:
            # The index in an error counts from the beginning of the stream.
            rollouts = [
                from_proto(each, f"rollouts[{index}]") for index, each in enumerate(request.rollouts, seen)
            ]
            seen += len(rollouts)
            stored = sum(self._store.put(rollout) for rollout in rollouts)
            self._count_puts(stored, len(rollouts) - stored)
            response.stored += stored
            response.refused += len(rollouts) - stored
        return response

    async def FetchRollouts(
        self, request: pb.FetchRolloutsRequest, context: Context
    ) -> AsyncIterator[pb.FetchRolloutsResponse]:
        """Return the rollouts of prompts, prompt by prompt in the order of the request."""
        violations = [] if request.run_id else [Violation("run_id", "is empty")]
        if not request.prompt_ids:
            violations.append(Violation("prompt_ids", "is empty; name at least one prompt"))
        if violations := violations + _empty_ids(request.prompt_ids):
            raise InvalidArgument(violations)
        self._metrics.fetches.inc()
        whole = not request.omit_covered_history
        for batch in batches(self._found(request.run_id, request.prompt_ids, whole)):
            yield pb.FetchRolloutsResponse(rollouts=batch)

    async def EvictRollouts(
        self, request: pb.EvictRolloutsRequest, context: Context
    ) -> pb.EvictRolloutsResponse:
        """Remove the rollouts that match all fields that are set."""
        violations = _empty_ids(request.prompt_ids)
        if request.kind and request.kind not in KINDS:
            violations.append(Violation("kind", f"is {request.kind}; must be PREGENERATED or HISTORY"))
        if not (request.run_id or request.prompt_ids or request.before_policy_version or request.kind):
            violations.append(
                Violation("run_id", "is empty, as are all other fields; set at least one to select rollouts")
            )
        if violations:
            raise InvalidArgument(violations)
        removed = self._store.evict(
            run_id=request.run_id or None,
            prompt_ids=frozenset(request.prompt_ids),
            before_version=request.before_policy_version or None,
            kind=KINDS.get(request.kind),
        )
        self._metrics.count_removals()
        return pb.EvictRolloutsResponse(removed=removed)

    async def GetDraftStats(
        self, request: pb.GetDraftStatsRequest, context: Context
    ) -> pb.GetDraftStatsResponse:
        """Return sizes of the store."""
        store = self._store
        return pb.GetDraftStatsResponse(
            prompts=store.prompts,
            rollouts=store.rollouts.total(),
            tokens=store.tokens,
            bytes=store.bytes,
            budget_bytes=store.budget_bytes,
            evicted=store.evicted,
            snapshot_at=timestamp(self._archive.taken_at) if self._archive.taken_at else None,
        )

    def _found(self, run_id: str, prompt_ids: Sequence[str], whole: bool) -> Iterator[StoredRollout]:
        for prompt_id in dict.fromkeys(prompt_ids):
            rollouts = self._store.fetch(run_id, prompt_id, whole=whole)
            self._metrics.prompts_fetched.labels("hit" if rollouts else "miss").inc()
            self._metrics.tokens_fetched.inc(sum(len(rollout.tokens) for rollout in rollouts))
            yield from rollouts

    def _count_puts(self, stored: int, refused: int) -> None:
        self._metrics.puts.labels("stored").inc(stored)
        self._metrics.puts.labels("refused").inc(refused)
        self._metrics.count_removals()


def _empty_ids(prompt_ids: Sequence[str]) -> list[Violation]:
    return [
        Violation(f"prompt_ids[{index}]", "is empty") for index, each in enumerate(prompt_ids) if not each
    ]


class Archive:
    """Snapshots of one store, in one file; without a `path` there are none."""

    def __init__(self, path: Path | None, store: DraftStore) -> None:
        self.taken_at = 0.0
        """Unix time of the last snapshot, including the one found at the start; 0: none."""
        self._path = path
        self._store = store
        self._changes = store.changes

    def restore(self) -> None:
        """Fill the empty store from the file.

        A file that cannot be used is renamed to *.refused; only its rollouts are lost.
        """
        if self._path is None or not self._path.exists():
            return
        try:
            taken_at, rollouts = open_snapshot(self._path)
            for rollout in rollouts:
                self._store.put(rollout)
        except (BadSnapshot, OSError) as error:
            log.error("snapshot_refused", path=str(self._path), error=str(error))
            self._set_aside(self._path)
        else:
            self.taken_at = taken_at
            self._changes = self._store.changes
            log.info("snapshot_restored", path=str(self._path), prompts=self._store.prompts)

    async def run(self, interval: float, stopping: asyncio.Event, metrics: DraftStoreMetrics) -> None:
        """Write a snapshot every `interval` seconds until `stopping` is set; complete the one in progress."""
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


class BadSnapshot(Exception):
    """Raised for a file that is damaged or not a snapshot of this format; the message says which."""


def write_snapshot(path: Path, rollouts: Iterable[StoredRollout], at: float) -> None:
    """Replace the file at `path`. If that raises OSError, the old file is unchanged."""
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


def _write(file: BinaryIO, rollouts: Iterable[StoredRollout], at: float) -> None:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)

    def write(part: bytes) -> None:
        digest.update(part)
        file.write(part)

    write(_SNAPSHOT_HEADER.pack(SNAPSHOT_MAGIC, SNAPSHOT_FORMAT, at))
    for batch in batches(rollouts):
        block = pb.PutRolloutsRequest(rollouts=batch).SerializeToString()
        write(_BLOCK_LENGTH.pack(len(block)))
        write(block)
    write(_BLOCK_LENGTH.pack(0))
    file.write(digest.digest())


def open_snapshot(path: Path) -> tuple[float, Iterator[StoredRollout]]:
    """Verify the whole file; return the unix time at which it was taken, and an iterator over its rollouts.

    OSError if it cannot be read, BadSnapshot if it cannot be used; the iterator raises that for an invalid rollout.
    """
    with path.open("rb") as file:
        header = file.read(_SNAPSHOT_HEADER.size)
        if len(header) < _SNAPSHOT_HEADER.size or not header.startswith(SNAPSHOT_MAGIC):
            raise BadSnapshot("is not a snapshot of a draft store")
        _, written, at = _SNAPSHOT_HEADER.unpack(header)
        if written != SNAPSHOT_FORMAT:
            raise BadSnapshot(f"has format {written}; this version reads {SNAPSHOT_FORMAT}")
        left = os.fstat(file.fileno()).st_size - _SNAPSHOT_HEADER.size - _DIGEST_BYTES
        digest = hashlib.blake2b(header, digest_size=_DIGEST_BYTES)
        while left > 0 and (chunk := file.read(min(left, _CHUNK_BYTES))):
            digest.update(chunk)
            left -= len(chunk)
        if file.read() != digest.digest():
            raise BadSnapshot("is damaged: its checksum does not match")
    return at, _rollouts_of(path)


def _rollouts_of(path: Path) -> Iterator[StoredRollout]:
    """Yield the rollouts of a verified file in the order in which they were written."""
    with path.open("rb") as file:
        file.seek(_SNAPSHOT_HEADER.size)
        while length := _BLOCK_LENGTH.unpack(file.read(_BLOCK_LENGTH.size))[0]:
            try:
                block = pb.PutRolloutsRequest.FromString(file.read(length))
                found = [from_proto(each) for each in block.rollouts]
            except (DecodeError, InvalidArgument) as error:
                raise BadSnapshot(f"holds something else than rollouts: {error}") from None
            yield from found


class DraftStoreMetrics(MetricSet, prefix="paceline_drafts_"):
    """All metrics of a replica."""

    prompts = gauge("prompts", "Prompts that have rollouts.")
    tokens = gauge("tokens", "Tokens stored.")
    bytes = gauge("bytes", "Bytes charged for what is stored.")
    budget_bytes = gauge("budget_bytes", "Most bytes that may be stored.")
    snapshot_at = gauge("snapshot_timestamp_seconds", "Unix time of the last snapshot; 0: none.")
    rollouts = gauge("rollouts", "Rollouts stored, by kind.", "kind")
    puts = counter("puts_total", "Rollouts put: stored or refused.", "outcome")
    fetches = counter("fetches_total", "Shards fetched.")
    prompts_fetched = counter("prompts_fetched_total", "Prompts queried: hit or miss.", "outcome")
    tokens_fetched = counter("tokens_fetched_total", "Tokens sent in answer to fetches.")
    snapshot_failures = counter("snapshot_failures_total", "Snapshots that could not be written.")
    snapshot_seconds = histogram("snapshot_seconds", "Time to write a snapshot.", _SNAPSHOT_SECONDS)
    removals = counter("removals_total", "Rollouts removed, by cause.", "cause", values=Cause)

    def __init__(
        self, registry: CollectorRegistry, store: DraftStore, snapshot_at: Callable[[], float]
    ) -> None:
        """`snapshot_at` returns the unix time of the last snapshot."""
        super().__init__(registry)
        self._store = store
        self._reported = dict.fromkeys(Cause, 0)
        self.snapshot_at.set_function(snapshot_at)
        for name in ("prompts", "tokens", "bytes", "budget_bytes"):
            getattr(self, name).set_function(partial(getattr, store, name))
        for kind in RolloutKind:
            self.rollouts.labels(kind.value).set_function(partial(store.rollouts.__getitem__, kind))

    def count_removals(self) -> None:
        """Update the counter of removals, after a call that may remove rollouts."""
        for cause, reported in self._reported.items():
            self.removals.labels(cause.value).inc(self._store.removed[cause] - reported)
            self._reported[cause] = self._store.removed[cause]
