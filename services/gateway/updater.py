"""Carries out weight updates on the instances; what is allowed when is decided in update.py."""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence

import grpc
import structlog
from redis.exceptions import RedisError

from paceline.internal.v1 import generation_pb2
from paceline.v1 import weight_pb2
from services.gateway.config import GatewayConfig
from services.gateway.dispatcher import Dispatcher
from services.gateway.fleet import Fleet, State
from services.gateway.journal import Fenced
from services.gateway.metrics import GatewayMetrics
from services.gateway.outcomes import UNWELL, Outcome, attempt, passed_on
from services.gateway.roster import Connection, Roster
from services.gateway.update import Update, UpdateBook, UpdatePhase
from services.gateway.versions import VersionStore
from services.platform.errors import DataLoss, FailedPrecondition, Unavailable

log = structlog.get_logger(__name__)

# An instance may still be ending cancelled samples when it is told to apply.
_SETTLE_SECONDS, _SETTLE_PAUSE = 5.0, 0.05
_SAVE_PAUSE, _SAVE_PAUSE_MOST = 0.1, 2.0


class Updater:
    """One update at a time. Long calls of one trainer are not undone by its going away."""

    def __init__(
        self,
        config: GatewayConfig,
        book: UpdateBook,
        store: VersionStore,
        fleet: Fleet,
        roster: Roster,
        dispatcher: Dispatcher,
        metrics: GatewayMetrics,
    ) -> None:
        self.book = book
        self.last: list[weight_pb2.InstanceUpdate] = []
        self._config = config
        self._store = store
        self._fleet = fleet
        self._roster = roster
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._lock = asyncio.Lock()
        self._checksums: dict[str, str] = {}
        self._stage_seconds: dict[str, float] = {}
        self._tasks: set[asyncio.Task[object]] = set()

    async def run(self) -> None:
        """Finishes an update that a former gateway left half applied, then drops abandoned ones."""
        try:
            if self.book.is_applying():
                async with self._lock:
                    await self._roll_forward()
            while True:
                await asyncio.sleep(min(1.0, self._config.update_timeout_seconds / 4))
                async with self._lock:
                    await self._drop_abandoned()
        finally:
            for task in self._tasks:
                task.cancel()

    async def start(self, run_id: str, version: int) -> Update:
        """Phase 1: claims the update."""
        async with self._lock:
            if self.book.version is None:
                raise Unavailable("no instance has registered yet, so there is no current version")
            await self._drop_abandoned()
            update = self.book.start(uuid.uuid4().hex, run_id, version, time.time())
            await self._save_or_drop()
        log.info("update_started", update=update.update_id, version=version)
        return update

    async def stage(self, update_id: str, disk: weight_pb2.DiskWeights) -> list[weight_pb2.InstanceUpdate]:
        """Phase 2: every live instance checks and stages the weights. One that finds them wrong ends the
        attempt everywhere, with its error; one that does not answer does not count."""
        async with self._lock:
            update = self.book.open_for(update_id, UpdatePhase.STARTED, UpdatePhase.STAGED)
            await self._roster.settled()
            begin = time.perf_counter()
            results = await self._on_all(self._roster.live(), lambda each: self._stage(each, update, disk))
            self._metrics.update_seconds.labels("stage").observe(time.perf_counter() - begin)
            await self._judge_staging(update, results)
            checksum = next(iter(self._checksums.values()))
            self.book.staged(update_id, disk.path, checksum, time.time())
            await self._store.save(self.book)
        log.info("update_staged", update=update_id, version=update.version, path=disk.path)
        return [result for _, result, _ in results]

    async def finish(self, update_id: str) -> list[weight_pb2.InstanceUpdate]:
        """Phase 3: applies the weights and publishes the version. Answered again for the last update."""
        published = self.book.published
        if published is not None and published.update_id == update_id and self.book.active is None:
            return self.last
        return await self._to_the_end(self._finish(update_id))

    async def abort(self, update_id: str) -> None:
        """Phase 4 instead of 3: forgets the update."""
        async with self._lock:
            self.book.open_for(update_id, UpdatePhase.STARTED, UpdatePhase.STAGED)
            await self._forget("aborted")

    # Staging -------------------------------------------------------------------------------------------

    async def _stage(
        self, connection: Connection, update: Update, disk: weight_pb2.DiskWeights
    ) -> weight_pb2.InstanceUpdate:
        async with connection.weights:
            reply = await connection.stub.StageWeights(
                generation_pb2.StageWeightsRequest(
                    version=update.version, target=weight_pb2.WEIGHT_TARGET_POLICY, disk=disk
                ),
                timeout=self._config.stage_timeout_seconds,
            )
            connection.staged_version = update.version
        self._checksums[connection.instance_id] = reply.checksum
        self._stage_seconds[connection.instance_id] = reply.seconds
        return weight_pb2.InstanceUpdate(
            instance_id=connection.instance_id,
            version=connection.member.version,
            checksum=reply.checksum,
            stage_seconds=reply.seconds,
        )

    async def _judge_staging(self, update: Update, results: Sequence[Outcome]) -> None:
        wrong = [(each, error) for each, _, error in results if error and error.code not in UNWELL]
        if wrong:
            await self._discard(update.version)
            culprit, refusal = wrong[0]
            raise passed_on(culprit.instance_id, refusal)
        for connection, _, error in results:
            if error is not None:
                # It serves the old version for as long as that is published, and is brought up after.
                log.warning("not_staged", instance=connection.instance_id, error=error.message)
        staged = {
            each.instance_id: self._checksums[each.instance_id] for each, _, error in results if not error
        }
        if not staged:
            raise Unavailable("no instance could stage the weights", retry_after=2.0)
        if len(set(staged.values())) > 1:
            await self._discard(update.version)
            raise DataLoss(f"instances read different weights from the same path: {staged}")
        self._checksums = staged

    async def _discard(self, version: int) -> None:
        async def discard(connection: Connection) -> weight_pb2.InstanceUpdate:
            connection.staged_version = 0
            await connection.stub.DiscardWeights(
                generation_pb2.DiscardWeightsRequest(version=version),
                timeout=self._config.handshake_timeout_seconds,
            )
            return weight_pb2.InstanceUpdate(instance_id=connection.instance_id)

        for connection, _, error in await self._on_all(self._roster.live(), discard):
            if error is not None:
                log.warning("discard_failed", instance=connection.instance_id, error=error.message)

    # Applying ------------------------------------------------------------------------------------------

    async def _finish(self, update_id: str) -> list[weight_pb2.InstanceUpdate]:
        async with self._lock:
            update = self.book.open_for(update_id, UpdatePhase.STAGED, UpdatePhase.APPLYING)
            if update.phase is UpdatePhase.APPLYING:
                # An earlier attempt broke off past the point of no return.
                await self._roll_forward()
                return self.last
            staged = [each for each in self._roster.live() if each.staged_version == update.version]
            if not staged:
                raise Unavailable("every instance that had staged the weights is gone; stage them again")
            # No await between this check and the phase that keeps new samples out.
            self.book.applying(update_id, self._dispatcher.unfinished, time.time())
            # Who follows the dispatcher tells that nothing is to be pre-generated now.
            self._dispatcher.moved.set()
            try:
                await self._store.save(self.book)
            except (RedisError, Fenced):
                update.phase = UpdatePhase.STAGED
                raise
            results = await self._apply_on(staged, update)
            applied = [each for each, _, error in results if error is None]
            if not applied:
                await self._fail(update)
            await self._publish()
            for connection in applied:
                self._roster.confirm(connection, update.version, updated=True)
            self._reconcile()
            self.last = [result for _, result, _ in results]
            return self.last

    async def _apply_on(self, staged: Sequence[Connection], update: Update) -> list[Outcome]:
        begin = time.perf_counter()
        results = await self._on_all(staged, lambda each: self._apply(each, update.version))
        self._metrics.update_seconds.labels("apply").observe(time.perf_counter() - begin)
        for connection, _, error in results:
            connection.staged_version = 0
            if error is not None:
                self._roster.quarantine(connection, f"did not apply {update.version}: {error.message}")
        return results

    async def _apply(self, connection: Connection, version: int) -> weight_pb2.InstanceUpdate:
        request = generation_pb2.ApplyWeightsRequest(version=version)
        settled = time.monotonic() + _SETTLE_SECONDS
        async with connection.weights:
            while True:
                try:
                    reply = await connection.stub.ApplyWeights(
                        request, timeout=self._config.apply_timeout_seconds
                    )
                    break
                except grpc.aio.AioRpcError as error:
                    busy = error.code() is grpc.StatusCode.FAILED_PRECONDITION
                    if not busy or time.monotonic() > settled:
                        raise
                    await asyncio.sleep(_SETTLE_PAUSE)
        return weight_pb2.InstanceUpdate(
            instance_id=connection.instance_id,
            applied=True,
            version=version,
            checksum=self._checksums.get(connection.instance_id, ""),
            stage_seconds=self._stage_seconds.get(connection.instance_id, 0.0),
            apply_seconds=reply.seconds,
            dropped_blocks=reply.dropped_blocks,
        )

    async def _fail(self, update: Update) -> None:
        await self._forget("failed")
        self._reconcile()
        raise FailedPrecondition(
            "NO_INSTANCE_APPLIED",
            f"no instance applied version {update.version}; {self.book.version} stays the published one",
            current=str(self.book.version),
            requested=str(update.version),
        )

    async def _publish(self) -> None:
        published = self.book.publish()
        await self._save_for_sure()
        self._fleet.publish(published.version, recorded=True, now=asyncio.get_running_loop().time())
        self._metrics.updates.labels("published").inc()
        log.info("version_published", version=published.version, path=published.path)

    def _reconcile(self) -> None:
        """Connects anew to whoever has not the published version, so that it is brought to it."""
        for connection in list(self._roster.connections.values()):
            if connection.ready and connection.member.state is State.STALE:
                self._roster.recycle(connection)
        self._roster.changed.beat()
        self._dispatcher.pump_soon()

    async def _roll_forward(self) -> None:
        """Some instances may have the new version already: publishing it makes the roster bring all of
        them to it, from the recorded path."""
        update = self.book.active
        assert update is not None, "nothing to roll forward"
        log.warning("update_rolled_forward", update=update.update_id, version=update.version)
        await self._publish()
        self._reconcile()

    # All phases ----------------------------------------------------------------------------------------

    async def _on_all(
        self,
        connections: Sequence[Connection],
        do: Callable[[Connection], Awaitable[weight_pb2.InstanceUpdate]],
    ) -> list[Outcome]:
        if not connections:
            raise Unavailable("no live instance", retry_after=2.0)
        return await asyncio.gather(*(attempt(connection, do) for connection in connections))

    async def _drop_abandoned(self) -> None:
        update = self.book.expired(time.time())
        if update is not None:
            log.warning("update_abandoned", update=update.update_id, version=update.version)
            await self._forget("abandoned")

    async def _forget(self, outcome: str) -> None:
        update = self.book.active
        assert update is not None, "nothing to forget"
        self.book.drop()
        self._metrics.updates.labels(outcome).inc()
        log.info("update_dropped", update=update.update_id, version=update.version, outcome=outcome)
        await self._save_for_sure()
        if self._roster.live():
            await self._discard(update.version)
        self._roster.changed.beat()

    async def _save_or_drop(self) -> None:
        try:
            await self._store.save(self.book)
        except RedisError:
            self.book.drop()
            raise

    async def _save_for_sure(self) -> None:
        """Saves what has happened already and cannot be taken back: tries until Redis answers."""
        pause = _SAVE_PAUSE
        while True:
            try:
                return await self._store.save(self.book)
            except RedisError as error:
                log.warning("version_not_saved", error=str(error), retry_in=pause)
                await asyncio.sleep(pause)
                pause = min(pause * 2, _SAVE_PAUSE_MOST)

    async def _to_the_end(
        self, work: Awaitable[list[weight_pb2.InstanceUpdate]]
    ) -> list[weight_pb2.InstanceUpdate]:
        """Waits for the work; it goes on if the waiting is given up."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)
