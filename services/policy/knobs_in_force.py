"""Keep the knobs in force, and derive the knobs that instances use.

Knobs in force are settings, ladders and their revision. The effective knobs of an instance are its own
configuration, overridden by the settings of all scopes.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping

import structlog
from redis.exceptions import RedisError

from paceline.convert.fleet import knobs_from_proto, knobs_to_proto
from paceline.internal.v1 import policy_pb2 as pb
from paceline.v1 import knobs_pb2
from services.contracts.errors import Aborted, InvalidArgument, ServiceError
from services.contracts.knob_store import MAX_LADDERS, KnobRecords, KnobStore, Rung, StoredSetting
from services.contracts.knobs import Knobs, KnobScope, Setting, apply_request, capped, check, resolved
from services.platform.tasks import Notifier
from services.policy.metrics import PolicyMetrics

log = structlog.get_logger(__name__)


def in_scope(report: pb.GetSpeculationReportResponse, scope: KnobScope) -> bool:
    """Return True if the settings of a scope apply to an instance; the settings of a run apply to all."""
    return scope.name == {"model": report.model, "pool": report.pool}.get(scope.kind, scope.name)


def effective(
    records: KnobRecords, scope: KnobScope, reports: Mapping[str, pb.GetSpeculationReportResponse]
) -> tuple[list[knobs_pb2.EffectiveKnobs], list[str]]:
    """Return the knobs that instances use, for the samples of a run if `scope` is one.

    Args:
        records: settings and ladders in force.
        scope: scope of the instances.
        reports: latest reports of these instances, by instance id.

    Returns:
        Distinct knobs with the ids of their instances, most instances first, and the ids of instances that do not
        report their own configuration. Without any instance: the knobs of an instance without configuration.
    """
    alike: dict[tuple[bytes, str, str], list[str]] = {}
    unreported = []
    for instance_id, report in sorted(reports.items()):
        if report.HasField("own_knobs"):
            own = report.own_knobs.SerializeToString(deterministic=True)
            alike.setdefault((own, report.model, report.pool), []).append(instance_id)
        else:
            unreported.append(instance_id)
    found: dict[Knobs, list[str]] = {}
    for (own, model, pool), ids in alike.items():
        try:
            base = _knobs(own)
        except InvalidArgument:
            # The instance runs a later version, whose values are unknown here.
            unreported += ids
            continue
        found.setdefault(_used(records, scope, base, model, pool), []).extend(ids)
    if not reports:
        named = {scope.kind: scope.name}
        found[_used(records, scope, Knobs(), named.get("model", ""), named.get("pool", ""))] = []
    entries = sorted(found.items(), key=lambda entry: (-len(entry[1]), entry[1]))
    return [_message(knobs, sorted(ids)) for knobs, ids in entries], sorted(unreported)


def _knobs(own: bytes) -> Knobs:
    return resolved(Knobs(), [check(knobs_from_proto(knobs_pb2.Knobs.FromString(own)))])


def _used(records: KnobRecords, scope: KnobScope, base: Knobs, model: str, pool: str) -> Knobs:
    shared, runs = records.settings_for(model, pool)
    knobs = resolved(base, [shared])
    if scope.kind != "run":
        return knobs
    return capped(resolved(knobs, [runs.get(scope.name, {})]), records.caps().get(scope.name))


def _message(knobs: Knobs, instance_ids: list[str]) -> knobs_pb2.EffectiveKnobs:
    return knobs_pb2.EffectiveKnobs(
        knobs=knobs_to_proto(knobs.model_dump(mode="json")), instance_ids=instance_ids
    )


class KnobsInForce:
    """Write-through copy of the knob store for one term of leadership, which is sent to instances.

    `changed` notifies of a new revision, `answered` when an instance uses one or is gone.

    A change always gets a revision above the latest, even if Redis gave it a lower one: `exceed` may have raised
    the revision while the change was stored, and instances may have received the raised revision without the
    change.
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
        """Load the records of former leaders. Errors of Redis are raised."""
        records = await store.load()
        records.revision = await store.raise_to(records.revision)
        return cls(store, records, metrics)

    @property
    def revision(self) -> int:
        """Revision of the latest change."""
        return self.records.revision

    def setting(self, scope: KnobScope) -> StoredSetting:
        """Return the setting of a scope itself, without the settings of wider scopes."""
        return self.records.settings.get(scope, StoredSetting())

    def seconds_since(self, revision: int) -> float:
        """Return the seconds since the latest revision was made; 0 for another revision."""
        latest, changed_at = self._changed_at
        return asyncio.get_running_loop().time() - changed_at if revision == latest else 0.0

    def request_for(self, report: pb.GetSpeculationReportResponse) -> pb.ApplyKnobsRequest:
        """Return all knobs that an instance should use, by its model and pool."""
        shared, runs = self.records.settings_for(report.model, report.pool)
        return apply_request(self.revision, shared, runs, self.records.caps())

    async def set(self, scope: KnobScope, revision: int, knobs: Setting) -> int:
        """Store a checked setting made from `revision` and return the new revision. Raises as `KnobStore.set`.

        If the scope has this setting already, its revision is returned: a caller may repeat a change whose answer
        was lost.
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
        """Raise the revision above one that an instance has and Redis has lost."""
        try:
            self._advance(await self._store.raise_to(revision + 1))
        except (ServiceError, RedisError) as error:
            log.warning("revision_not_raised", error=str(error))

    async def _reload(self) -> None:
        """Adopt the settings of a Redis that has lost some, so that callers see which are in force."""
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
