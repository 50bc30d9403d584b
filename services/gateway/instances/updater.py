"""Run weight updates on all instances, in the phases of `services.gateway.state.update_book`.

One update runs at a time: its weights are staged; unfinished samples delay it, end or continue; the instances apply
the weights; and the version is published. Once instances apply weights there is no way back: a gateway that
restarts then finishes the update.
"""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import structlog
from redis.exceptions import RedisError

from paceline.v1 import weight_pb2 as pb
from services.contracts.errors import KEEPING_KV, FailedPrecondition, Unavailable, kv_not_kept
from services.gateway.instances.connection import Connection, InstanceResult, on_all
from services.gateway.instances.roster import Roster
from services.gateway.instances.staging import HandedOver, InstanceStaging, UpdateStaging
from services.gateway.journal.fenced_records import Fenced, VersionStore, save_until_stored
from services.gateway.metrics import GatewayMetrics
from services.gateway.scheduler.scheduler import Scheduler
from services.gateway.state.fleet_health import FleetHealth, MemberState
from services.gateway.state.update_book import InFlightTreatment, UpdateBook, UpdatePhase, WeightUpdate
from services.platform.redis.decision_log import DecisionRecord
from services.platform.redis.registry import InstanceRecord
from services.platform.tasks import to_the_end

log = structlog.get_logger(__name__)

UPDATE_KIND = "weights"
"""Kind of a decision-log entry about a published version."""


@dataclass(frozen=True, slots=True)
class FinishedUpdate:
    """Published update: the outcome on each instance, and the numbers of samples that it aborted and continued."""

    instances: list[pb.InstanceUpdate] = field(default_factory=list)
    aborted: int = 0
    continued: int = 0


@dataclass(eq=False)
class Updater:
    """Coordinator of weight updates, one at a time.

    An update that its trainer abandons is dropped. A call that changes the update completes even if the trainer
    disconnects; one that only waits for instances holds no lock, so that the update can be aborted meanwhile.
    """

    book: UpdateBook
    store: VersionStore
    fleet: FleetHealth
    roster: Roster
    samples: InFlightSamples
    metrics: GatewayMetrics
    record: Callable[[DecisionRecord], None]
    # Phase -> unix time at which it began, of the update in progress, if this process has seen it.
    _times: dict[str, float] = field(init=False, default_factory=dict)
    _lock: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)
    _last: FinishedUpdate = field(init=False, default_factory=FinishedUpdate)
    # The update that was aborted last.
    _aborted: str = field(init=False, default="")
    _tasks: set[asyncio.Task[object]] = field(init=False, default_factory=set)
    _staging: UpdateStaging = field(init=False)

    def __post_init__(self) -> None:
        self._staging = UpdateStaging(self.roster, self.metrics)

    async def run(self) -> None:
        """Drop abandoned updates until cancelled.

        First finishes an update that a former gateway left half applied.
        """
        try:
            if self.book.is_applying():
                async with self._lock:
                    await self._roll_forward()
            while True:
                await asyncio.sleep(min(1.0, self.book.timeout / 4))
                async with self._lock:
                    await self._drop_abandoned()
        finally:
            for task in self._tasks:
                task.cancel()
            self._staging.end()

    async def start(
        self, run_id: str, version: int, push_id: str = "", *, streamed: bool = False
    ) -> WeightUpdate:
        """Start an update (phase 1), whose weights are pushed to the instances if it is `streamed`.

        It replaces an update that another push of the same run has started: the trainer was restarted, and has
        other weights.
        """
        ticket = secrets.token_urlsafe(32) if streamed else ""
        return await to_the_end(self._start(run_id, version, push_id, ticket), self._tasks)

    async def stream_target(self, update_id: str) -> pb.StreamTarget:
        """Return the instance to push the weights of an update to. The others fetch them from it.

        ServiceError: no instance can take them.
        """
        async with self._lock:
            update = self.book.open_for(update_id, UpdatePhase.STARTED, UpdatePhase.STAGED)
            target = await self._staging.stream_target(update)
            # Not before: an update that no instance can take expires, however often it is started again.
            update.touched_at = time.time()
            return target

    async def stage(self, update_id: str, source: HandedOver) -> list[pb.InstanceUpdate]:
        """Have every live instance check and stage the weights (phase 2); wait until all have the pushed ones."""
        async with self._lock:
            update = self.book.open_for(update_id, UpdatePhase.STARTED, UpdatePhase.STAGED)
            update.touched_at = time.time()
            staging = await self._staging.begin(update, source)
        results = await self._staging.results(staging)
        return await to_the_end(self._conclude(update, staging, source, results), self._tasks)

    async def finish(
        self, update_id: str, in_flight: InFlightTreatment = InFlightTreatment.REFUSE
    ) -> FinishedUpdate:
        """Apply the weights and publish the version (phase 3). For the last update, repeats the answer."""
        return await to_the_end(self._finish(update_id, in_flight), self._tasks)

    async def abort(self, update_id: str) -> None:
        """Drop the update instead of finishing it. For the update aborted last, does nothing."""
        await to_the_end(self._abort(update_id), self._tasks)

    async def _start(self, run_id: str, version: int, push_id: str, ticket: str) -> WeightUpdate:
        async with self._lock:
            if self.book.version is None:
                raise Unavailable("no instance has registered yet, so there is no current version")
            await self._drop_abandoned()
            if self.book.is_of_another_push(run_id, push_id):
                await self._forget("abandoned")
            update_id = uuid.uuid4().hex
            update = self.book.start(update_id, run_id, version, time.time(), ticket, push_id)
            try:
                await self.store.save(self.book)
            except RedisError:
                if update.update_id == update_id:
                    self.book.drop()
                raise
        if update.update_id == update_id:
            self._times = {"started": time.time()}
            log.info("update_started", update=update_id, version=version)
        return update

    async def _conclude(
        self,
        update: WeightUpdate,
        staging: InstanceStaging,
        source: HandedOver,
        results: list[InstanceResult],
    ) -> list[pb.InstanceUpdate]:
        async with self._lock:
            self.book.open_for(update.update_id, UpdatePhase.STARTED, UpdatePhase.STAGED)
            path, checksum = await self._staging.conclude(update, staging, source, results)
            self.book.staged(update.update_id, path, checksum, time.time())
            self._times["staged"] = time.time()
            await self.store.save(self.book)
        log.info("update_staged", update=update.update_id, version=update.version, path=path)
        return [result.update for result in results]

    async def _abort(self, update_id: str) -> None:
        async with self._lock:
            if update_id != self._aborted:
                self.book.open_for(update_id, UpdatePhase.STARTED, UpdatePhase.STAGED)
                await self._forget("aborted")
                self._aborted = update_id

    # Applying ------------------------------------------------------------------------------------------

    async def _finish(self, update_id: str, in_flight: InFlightTreatment) -> FinishedUpdate:
        async with self._lock:
            published = self.book.published
            if published is not None and published.update_id == update_id and self.book.active is None:
                return self._last
            update = self.book.open_for(update_id, UpdatePhase.STAGED, UpdatePhase.APPLYING)
            # A call that still waits for the staging must not stage again after the version is published.
            self._staging.end()
            if update.phase is UpdatePhase.APPLYING:
                # An earlier attempt stopped after the point of no return.
                await self._roll_forward()
                return self._last
            staged = await self._staging.instances_with(update)
            if not self.roster.live():
                raise Unavailable("no instance is there to apply the weights")
            if not staged:
                raise FailedPrecondition(
                    "WEIGHTS_NOT_STAGED",
                    "every instance that had staged the weights is gone; stage them again",
                    update_id=update_id,
                    version=str(update.version),
                )
            if in_flight is InFlightTreatment.KEEP_KV:
                check_keeps_kv(each.member.record for each in staged)
            # No await between this check and the phase that keeps new samples out.
            self.book.applying(update_id, self.samples.unfinished, time.time(), in_flight)
            self._times["applying"] = time.time()
            with self.samples.held():
                return await self._replace(update, staged)

    async def _replace(self, update: WeightUpdate, staged: Sequence[Connection]) -> FinishedUpdate:
        """Have these instances replace their weights, and publish the version. The phase is APPLYING."""
        try:
            await self.store.save(self.book)
        except (RedisError, Fenced):
            update.phase = UpdatePhase.STAGED
            raise
        counts = await self.samples.prepare(update.in_flight)
        results = await apply_on_all(staged, update, self.roster, self._staging)
        applied = [result.connection for result in results if result.error is None]
        if not applied:
            await self._forget("failed")
            await self._reconcile()
            raise FailedPrecondition(
                "NO_INSTANCE_APPLIED",
                f"no instance applied version {update.version}; {self.book.version} stays the published one",
                current=str(self.book.version),
                requested=str(update.version),
            )
        await self._publish()
        for connection in applied:
            self.roster.confirm(connection, update.version, updated=True)
        self.samples.follow()
        await self._reconcile()
        self._last = FinishedUpdate([result.update for result in results], *counts)
        return self._last

    async def _publish(self) -> None:
        run_id = self.book.active.run_id if self.book.active is not None else ""
        published = self.book.publish()
        # GetVersions returns this version from here on.
        self.metrics.updates.labels("published").inc()
        now = time.time()
        self.record(update_record(self._times, published.version, run_id, now))
        self.samples.scheduler.weights_updated(run_id, self._times.get("started", now), now)
        self._times = {}
        await save_until_stored(self.store, self.book)
        self.fleet.publish(published.version, recorded=True, now=asyncio.get_running_loop().time())
        log.info("version_published", version=published.version, path=published.path)

    async def _reconcile(self) -> None:
        """Reconnect to instances without the published version, so that they are brought to it."""
        for connection in list(self.roster.connections.values()):
            await self.roster.pace.wait()
            stale = connection.ready and connection.member.state is MemberState.STALE
            if stale and not connection.gone.is_set():
                self.roster.recycle(connection)
        self.roster.notify(changed=True)

    async def _roll_forward(self) -> None:
        """Publish the version of a half applied update, which some instances may have already.

        The roster then brings all instances to it, from the recorded path.
        """
        update = self.book.active
        assert update is not None, "nothing to roll forward"
        log.warning("update_rolled_forward", update=update.update_id, version=update.version)
        with self.samples.held():
            await self._publish()
            self.samples.follow()
            await self._reconcile()

    # All phases ----------------------------------------------------------------------------------------

    async def _drop_abandoned(self) -> None:
        if self._staging.running and self.book.active is not None:
            # Instances give up by themselves when nothing arrives.
            self.book.active.touched_at = time.time()
        update = self.book.expired(time.time())
        if update is not None:
            log.warning("update_abandoned", update=update.update_id, version=update.version)
            await self._forget("abandoned")

    async def _forget(self, outcome: str) -> None:
        update = self.book.active
        assert update is not None, "nothing to forget"
        self._staging.end()
        self.book.drop()
        self.metrics.updates.labels(outcome).inc()
        log.info("update_dropped", update=update.update_id, version=update.version, outcome=outcome)
        await save_until_stored(self.store, self.book)
        if self.roster.live():
            await self._staging.discard(update.version)
        self.roster.notify(changed=True)


@dataclass(eq=False)
class InFlightSamples:
    """Treatment of the unfinished samples of all batches by a weight update."""

    book: UpdateBook
    scheduler: Scheduler
    metrics: GatewayMetrics

    def __post_init__(self) -> None:
        # A former gateway may have left an update half applied, which is finished as soon as the term begins.
        self.scheduler.placer.held = self.book.is_applying()

    @property
    def unfinished(self) -> int:
        """Number of samples that have not ended or are about to be accepted."""
        return self.scheduler.batches.unfinished

    @contextmanager
    def held(self) -> Iterator[None]:
        """Place nothing while weights are applied: an instance may have either version."""
        placer = self.scheduler.placer
        placer.held = True
        # Report to the bubble coordinator that nothing is to be pre-generated now.
        self.scheduler.batches.progress.set()
        try:
            yield
        finally:
            placer.held = False
            placer.pump_soon()

    async def prepare(self, treatment: InFlightTreatment) -> tuple[int, int]:
        """Abort or continue samples before weights are applied; return the numbers of aborted and continued ones.

        An aborted sample ends when its instance has answered; the instance applies no weights before.
        """
        aborted = continued = 0
        if treatment is InFlightTreatment.ABORT:
            batches = list(self.scheduler.batches.by_key.values())
            cancelling = [
                self.scheduler.cancel(running, range(len(running.batch.samples)), keep_partial=True)
                for running in batches
            ]
            aborted = sum(await asyncio.gather(*cancelling))
        elif treatment is InFlightTreatment.CONTINUE:
            continued = self.unfinished
        self.metrics.in_flight_samples.labels("aborted").inc(aborted)
        self.metrics.in_flight_samples.labels("continued").inc(continued)
        return aborted, continued

    def follow(self) -> None:
        """Let every batch continue under the published version, or end if its version is no longer served."""
        for running in list(self.scheduler.batches.by_key.values()):
            batch = running.batch
            self.scheduler.continue_under(
                running, self.book.version_for(batch.policy_version, batch.max_staleness)
            )


async def apply_on_all(
    connections: Sequence[Connection], update: WeightUpdate, roster: Roster, staging: UpdateStaging
) -> list[InstanceResult]:
    """Have instances replace their weights by the staged ones; quarantine those that fail."""
    begin = time.perf_counter()
    order = order_of(update)
    results = await on_all(connections, lambda each: each.apply(update.version, order), roster.pace)
    staging.metrics.update_seconds.labels("apply").observe(time.perf_counter() - begin)
    for result in results:
        connection = result.connection
        connection.staged_version = 0
        if result.error is not None:
            roster.quarantine(connection, f"did not apply {update.version}: {result.error.message}")
        else:
            staging.describe(result)
    return results


def order_of(update: WeightUpdate) -> pb.InFlight:
    """Return the treatment of running samples that the instances are asked for."""
    if update.in_flight is not InFlightTreatment.CONTINUE:
        return pb.IN_FLIGHT_REFUSE
    return pb.IN_FLIGHT_KEEP_KV if update.keeps_kv else pb.IN_FLIGHT_CONTINUE


def check_keeps_kv(records: Iterable[InstanceRecord]) -> None:
    """Raise FailedPrecondition for the first instance whose samples cannot keep their KV over an update."""
    for record in records:
        if not record.keeps_kv:
            why = record.refused_features.get(KEEPING_KV, "its release does not know KEEP_KV")
            raise kv_not_kept(record.instance_id, why)


def update_record(times: Mapping[str, float], version: int, run_id: str, now: float) -> DecisionRecord:
    """Return the decision-log entry of an update that is published now.

    `times` are the unix times at which its phases began, if they are known.
    """
    times = {**times, "published": now}
    seconds = now - min(times.values())
    details = {"version": version, **{phase: round(at, 4) for phase, at in times.items()}}
    return DecisionRecord(UPDATE_KIND, f"version {version} after {seconds:.1f} s", 0.0, details, now, run_id)
