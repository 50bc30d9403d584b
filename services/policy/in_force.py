"""Knobs in force: settings and ladders, and the revision that every instance should use."""

from __future__ import annotations

import asyncio
import time
import uuid

import structlog
from redis.exceptions import RedisError

from paceline.internal.v1 import policy_pb2 as pb
from services.contracts.errors import Aborted, ServiceError
from services.contracts.knob_messages import apply_request
from services.contracts.knob_store import MAX_LADDERS, KnobRecords, KnobStore, Rung, StoredSetting
from services.contracts.knobs import KnobScope, Setting
from services.platform.notify import Notifier
from services.policy.metrics import PolicyMetrics

log = structlog.get_logger(__name__)


class KnobsInForce:
    """Copy of the knob store that one term of leadership keeps, writes through and sends to instances.

    `changed` notifies of a new revision, `answered` of an instance that uses one or is gone.

    A change always gets a revision above the latest, even where Redis gave it a lower one: `exceed` may have raised
    the revision while the change was stored, and instances may have got that one without the change.
    """

    def __init__(self, store: KnobStore, records: KnobRecords, metrics: PolicyMetrics) -> None:
        self.changed, self.answered = Notifier(), Notifier()
        self.records = records
        self._store = store
        self._metrics = metrics
        self._changed_at = (records.revision, asyncio.get_running_loop().time())
        metrics.revision.set(records.revision)

    @classmethod
    async def load(cls, store: KnobStore, metrics: PolicyMetrics) -> KnobsInForce:
        """Read what former leaders left. Raises what Redis raises."""
        records = await store.load()
        records.revision = await store.raise_to(records.revision)
        return cls(store, records, metrics)

    @property
    def revision(self) -> int:
        """Revision of the latest change."""
        return self.records.revision

    def setting(self, scope: KnobScope) -> StoredSetting:
        """Return the setting of a scope itself, without those of wider scopes."""
        return self.records.settings.get(scope, StoredSetting())

    def seconds_since(self, revision: int) -> float:
        """Return the seconds since a revision was made; 0 for one that is not the latest."""
        latest, changed_at = self._changed_at
        return asyncio.get_running_loop().time() - changed_at if revision == latest else 0.0

    def request_for(self, report: pb.GetSpeculationReportResponse) -> pb.ApplyKnobsRequest:
        """Return everything that an instance should use, by its model and pool."""
        shared, runs = self.records.settings_for(report.model, report.pool)
        return apply_request(self.revision, shared, runs, self.records.caps())

    async def set(self, scope: KnobScope, revision: int, knobs: Setting) -> int:
        """Store a checked setting made from `revision` and return the new revision. Raises as `KnobStore.set`.

        Where it is the scope's setting already, the answer is its revision: a change whose answer was lost is
        made again.
        """
        try:
            made = await self._store.set(scope, revision, knobs, uuid.uuid4().hex)
        except Aborted:
            await self._reload()
            found = self.records.settings.get(scope)
            if found is None or found.knobs != knobs:
                raise
            return found.revision
        self.records.settings[scope] = StoredSetting(made, knobs)
        self._advance(max(made, self.revision + 1))
        return made

    async def climb(self, run_id: str, rung: Rung, moved: bool) -> None:
        """Store the position of a run on its ladder. Raises as `KnobStore.set`."""
        revision = await self._store.climb(run_id, rung, moved, time.time())
        rungs = self.records.rungs
        rungs[run_id] = rung
        self._metrics.draft_cap.labels(run_id).set(rung.cap)
        while len(rungs) > MAX_LADDERS:
            oldest = next(each for each in rungs if each != run_id)
            del rungs[oldest]
            self._metrics.draft_cap.remove(oldest)
        self._advance(max(revision, self.revision + moved))

    async def exceed(self, revision: int) -> None:
        """Continue above a revision that an instance has and Redis has lost."""
        try:
            self._advance(await self._store.raise_to(revision + 1))
        except (ServiceError, RedisError) as error:
            log.warning("revision_not_raised", error=str(error))

    async def _reload(self) -> None:
        """Adopt the settings of a Redis that has lost some: those are in force, and callers are told so."""
        stored = await self._store.load()
        if stored.settings != self.records.settings:
            log.warning("settings_lost", known=len(self.records.settings), kept=len(stored.settings))
            self.records.settings, self.records.rungs = stored.settings, stored.rungs
            self._advance(await self._store.raise_to(self.revision + 1))

    def _advance(self, revision: int) -> None:
        if revision <= self.revision:
            return
        self.records.revision = revision
        self._changed_at = (revision, asyncio.get_running_loop().time())
        self._metrics.revision.set(revision)
        self.changed.notify()
