"""Deployment of drafters: a record in Redis names the current one, its checkpoint is on disk, instances load it.

A link to each instance process loads the current drafter there and fetches its live acceptance.
"""

from __future__ import annotations

import asyncio
from enum import StrEnum
from pathlib import Path
from typing import Any

import grpc
import structlog
from redis.asyncio import Redis

from paceline.internal.v1 import drafter_pb2 as pb
from paceline.internal.v1 import drafter_pb2_grpc as rpc
from services.contracts import drafter_checkpoint as checkpoints
from services.contracts.fenced import FencedScripts
from services.contracts.learner import DrafterHistory, DrafterKeys, PublishedDrafter, read_history
from services.drafter.config import DrafterConfig
from services.drafter.metrics import DrafterMetrics
from services.drafter.publishing.decisions import LiveAcceptance, is_refused
from services.platform.grpc.channel import Link, Links
from services.platform.redis.connection import Keys
from services.platform.redis.registry import InstanceRecord, Registry
from services.platform.tasks import Notifier

log = structlog.get_logger(__name__)

# KEYS: lease, version. ARGV: term, least. Returns an unused version above `least`.
_NEXT_VERSION = """
local known = tonumber(redis.call('GET', KEYS[2]) or '0')
local new = math.max(known, tonumber(ARGV[2])) + 1
redis.call('SET', KEYS[2], string.format('%d', new))
return new
"""

# KEYS: lease, published. ARGV: term, record.
_PUT = """
redis.call('SET', KEYS[2], ARGV[2])
return 1
"""

# Deadline of a query, and the interval between queries to an instance without a drafter.
_CALL_SECONDS, _WITHOUT_SECONDS = 2.0, 30.0
_NO_DRAFTER = (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.FAILED_PRECONDITION)
# Errors of the checkpoint itself: another attempt would not help.
_REFUSALS = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.DATA_LOSS)


class DrafterStatus(StrEnum):
    """Status of an instance with respect to the current drafter."""

    BEHIND = "behind"
    CURRENT = "current"
    REFUSED = "refused"
    WITHOUT = "without"
    """The instance has no EAGLE-3 drafter."""


class DrafterLink(Link):
    """Link to one process of an instance. `version` and `live` are as last reported."""

    def __init__(
        self, record: InstanceRecord, config: DrafterConfig, deployment: Deployment, metrics: DrafterMetrics
    ) -> None:
        super().__init__(record, config, deployment.changed, metrics.loads.labels("failed"))
        self.status = DrafterStatus.BEHIND
        self.version = 0
        self.live = LiveAcceptance()
        self._config = config
        self._deployment = deployment
        self._metrics = metrics
        self._refused: PublishedDrafter | None = None
        self._stub: Any = rpc.DraftModelServiceStub(self._channel)

    async def call(self) -> float:
        """Fetch a report, load the current drafter if it is not in use, and return the seconds to the next call."""
        try:
            report = await self._stub.GetDraftModel(pb.GetDraftModelRequest(), timeout=_CALL_SECONDS)
            self.version = report.drafter_version
            self.live = LiveAcceptance(report.drafts, report.draft_tokens, report.accepted_tokens)
            wanted = self._deployment.current
            if wanted is None or (report.drafter_version, report.sha256) == (wanted.version, wanted.sha256):
                self.status = DrafterStatus.CURRENT
            elif wanted != self._refused:
                await self._load(wanted)
        except grpc.aio.AioRpcError as error:
            if error.code() not in _NO_DRAFTER:
                raise
            self.status = DrafterStatus.WITHOUT
            return _WITHOUT_SECONDS
        return self._config.report_seconds

    async def _load(self, wanted: PublishedDrafter) -> None:
        self.status = DrafterStatus.BEHIND
        request = pb.LoadDraftModelRequest(
            drafter_version=wanted.version, path=wanted.path, sha256=wanted.sha256
        )
        instance = self.record.instance_id
        try:
            await self._stub.LoadDraftModel(request, timeout=self._config.load_timeout_seconds)
        except grpc.aio.AioRpcError as error:
            if error.code() not in _REFUSALS:
                raise
            self._refused, self.status = wanted, DrafterStatus.REFUSED
            self._metrics.loads.labels("refused").inc()
            log.error("drafter_refused", instance=instance, version=wanted.version, error=error.details())
            return
        self._refused, self.status = None, DrafterStatus.CURRENT
        self.version, self.live = wanted.version, LiveAcceptance()
        self._metrics.loads.labels("loaded").inc()
        log.info("drafter_loaded", instance=instance, version=wanted.version)


class Deployment(Links[DrafterLink]):
    """The current drafter, and the links that load it on all registered instances. `run` until cancelled.

    The leader is the only writer of the record of published drafters (`history`); `changed` notifies of a new
    current drafter. `busy`: an instance has samples. Methods that write raise Redis errors, and Unavailable when
    another process leads; they may be repeated.
    """

    def __init__(
        self, config: DrafterConfig, redis: Redis, term: int, metrics: DrafterMetrics, history: DrafterHistory
    ) -> None:
        """`history` is the record that former leaders left."""

        def dial(record: InstanceRecord) -> DrafterLink:
            return DrafterLink(record, config, self, metrics)

        super().__init__(Registry(redis, Keys(config.namespace)), dial, self._show_instances)
        self.changed = Notifier()
        self.history = history
        self.busy = False
        self._redis = redis
        self._namespace = config.namespace
        self._folder = config.checkpoints
        self._keys = DrafterKeys(config.namespace)
        self._scripts = FencedScripts(redis, self._keys.lease, term, "learner")
        self._metrics = metrics
        self._show_current()

    @property
    def current(self) -> PublishedDrafter | None:
        """The drafter that instances should use; None before any was published."""
        return self.history.current

    async def next_version(self) -> int:
        """Reserve a version that never named a drafter, above every version on disk or on an instance."""
        highest = await asyncio.to_thread(self._highest_version)
        deployed = max((link.version for link in self.known.values()), default=0)
        return int(await self._scripts.run(_NEXT_VERSION, (self._keys.version,), max(deployed, highest)))

    async def put(self, history: DrafterHistory) -> None:
        """Make a history the record: instances load its current drafter from now on."""
        await self._write(history)
        self.history = history
        self._show_current()
        self.changed.notify()

    async def restore(self) -> None:
        """Write the record again if Redis has lost it: instances read it when they start."""
        if self.current is not None and (await read_history(self._redis, self._namespace)).current is None:
            log.warning("drafter_record_lost", version=self.current.version)
            await self._write(self.history)

    def prune(self) -> None:
        """Remove the checkpoints that no rollback can reach."""
        kept = {each.path for each in self._recorded()}
        for path in self._on_disk().values():
            if str(path.absolute()) not in kept:
                checkpoints.discard(path)

    def live(self, version: int) -> LiveAcceptance:
        """Return the live acceptance of a version over all instances that use it now."""
        return sum((link.live for link in self.known.values() if link.version == version), LiveAcceptance())

    @property
    def refused(self) -> bool:
        """True if the instances refuse the current drafter."""
        count = self._count()
        return is_refused(
            count[DrafterStatus.CURRENT], count[DrafterStatus.REFUSED], count[DrafterStatus.BEHIND]
        )

    async def _write(self, history: DrafterHistory) -> None:
        await self._scripts.run(_PUT, (self._keys.published,), history.to_json())

    def _recorded(self) -> list[PublishedDrafter]:
        current = self.history.current
        return [*self.history.earlier, *([current] if current is not None else [])]

    def _highest_version(self) -> int:
        return max([*(each.version for each in self._recorded()), *self._on_disk()], default=0)

    def _on_disk(self) -> dict[int, Path]:
        found = {}
        for path in self._folder.iterdir() if self._folder.is_dir() else ():
            try:
                found[checkpoints.version_of(path)] = path
            except ValueError:
                continue
        return found

    def _show_current(self) -> None:
        self._metrics.version.set(self.current.version if self.current is not None else 0)
        self._metrics.published_at.set(self.current.at if self.current is not None else 0)

    def _show_instances(self, records: dict[str, InstanceRecord] | None) -> None:
        if records is not None:
            self.busy = any(record.samples for record in records.values())
        for status, count in self._count().items():
            self._metrics.instances.labels(status.value).set(count)

    def _count(self) -> dict[DrafterStatus, int]:
        found = [link.status for link in self.known.values()]
        return {status: found.count(status) for status in DrafterStatus}
