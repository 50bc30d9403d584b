"""Pre-generation of one instance: polls the coordinator of bubbles for tasks, runs them, and stores their tokens.

Three tasks run in the event loop: one reads the reports of the engine thread, one polls the coordinator, and one
starts forks. Urgent work is not done here: the engine thread itself ends background samples as soon as a real one
arrives.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import grpc
import structlog

from paceline.internal.v1 import bubble_pb2 as pb
from paceline.internal.v1 import bubble_pb2_grpc as rpc
from paceline.times import seconds_of
from services.contracts.errors import Unavailable
from services.contracts.rollout import StoredRollout
from services.generation.config import GenerationConfig
from services.generation.draft_cache.fetcher import ShardFetcher
from services.generation.loop.engine_loop import EngineLoop
from services.generation.loop.metrics import PregenerationMetrics
from services.generation.loop.work_items import AdmissionTerms
from services.generation.pregeneration.background import (
    POLL_STEPS,
    BackgroundReport,
    BackgroundStream,
    EngineAvailability,
    PollSituation,
    fetch_beginnings,
    start_task,
)
from services.generation.pregeneration.leases import DraftLease, DraftLeases, affordable
from services.generation.pregeneration.upload_queue import UploadQueue
from services.platform.config import ServiceConfig
from services.platform.grpc.channel import open_channel
from services.platform.redis.connection import OUTAGES
from services.platform.redis.registry import Registration, Registry
from services.platform.tasks import ExponentialBackoff, end

_log = structlog.get_logger(__name__)

SERVICE = "bubbles"
"""Name of the coordinator in the registry."""
# Longest time between two polls of an instance that has tasks, however long its steps are.
_SILENT_SECONDS = 3.0
# Deadline of a poll. The coordinator answers earlier.
_POLL_SECONDS = 30.0
# Time to wait for an answer with tasks once there is something newer to report: tasks of a cancelled poll are lost.
_GRACE_SECONDS = 0.1
# Time between two polls of an idle instance, if the first one brought no task.
_IDLE_SECONDS = 0.25
# First and longest delay after failures in a row.
_FIRST_DELAY, _LONGEST_DELAY = 0.25, 2.0
# Longest time that an update, or the end of the process, waits for the drafts to be stored.
_STORE_SECONDS = 1.0


class CoordinatorGone(Exception):
    """No coordinator is registered, or it does not answer; the message says which."""


class CoordinatorConnection:
    """Connection to the registered coordinator; it is dropped at a failure, and the coordinator looked up again."""

    def __init__(self, config: ServiceConfig, registry: Registry) -> None:
        self._config = config
        self._registry = registry
        self._channel: grpc.aio.Channel | None = None

    async def find(self) -> None:
        """Connect to the coordinator that registered last, unless connected.

        Raises:
            CoordinatorGone: none is registered, or the registry cannot be read.
        """
        if self._channel is not None:
            return
        try:
            records = await self._registry.list(SERVICE)
        except OUTAGES as error:
            raise CoordinatorGone(f"the registry cannot be read: {error}") from error
        if not records:
            raise CoordinatorGone("none is registered")
        record = max(records.values(), key=lambda each: each.registered_at)
        try:
            self._channel = open_channel(record.address, self._config)
        except ValueError as error:
            raise CoordinatorGone(str(error)) from error
        _log.info("coordinator_found", coordinator=record.instance_id, address=record.address)

    async def poll(self, request: pb.PollWorkRequest, seconds: float) -> pb.PollWorkResponse:
        """Poll the coordinator that was found, and wait at most `seconds`.

        Raises:
            CoordinatorGone: it did not answer, or with an error.
        """
        assert self._channel is not None, "a coordinator is found before it is polled"
        stub = rpc.BubbleServiceStub(self._channel)
        try:
            answer: pb.PollWorkResponse = await stub.PollWork(request, timeout=seconds)
        except grpc.aio.AioRpcError as error:
            raise CoordinatorGone(f"{error.code().name}: {error.details()}") from error
        return answer

    async def leave(self) -> None:
        """Close the connection."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()


class Pregenerator:
    """Generates samples of coming steps in bubbles, and forks of them.

    Usage: `run` in a separate task; `stored` before an update or the process ends.
    """

    def __init__(
        self,
        config: GenerationConfig,
        loop: EngineLoop,
        terms: Callable[[], AdmissionTerms],
        registration: Registration,
        fetcher: ShardFetcher | None,
        coordinator: CoordinatorConnection,
        uploads: UploadQueue,
        metrics: PregenerationMetrics,
    ) -> None:
        """Pre-generate on an instance.

        Args:
            config: of the instance.
            loop: of its engine.
            terms: returns the terms on which samples are taken; called in the engine thread.
            registration: of the instance; names its epoch.
            fetcher: brings the store's rollouts of a prompt into the loop's cache.
            coordinator: gives tasks.
            uploads: sends rollouts to the draft store.
            metrics: of pre-generation.
        """
        self.metrics = metrics
        metrics.asleep.set_function(lambda: float(loop.asleep))
        self._config = config
        self._loop = loop
        self._registration = registration
        self._coordinator = coordinator
        self._uploads = uploads
        self._stream = BackgroundStream(
            asyncio.get_running_loop(), loop.samples, lambda: not loop.paused and not terms().closed
        )
        self._terms = terms
        self._fetcher = fetcher
        self._fetches = 0
        self._leases = DraftLeases()
        self._engine = EngineAvailability()
        self._due = False
        self._running = False
        self._polled_at = 0.0
        # Number of the leases' news that were reported to the coordinator.
        self._reported_news = 0
        # Set when something happens that the poll in progress does not report.
        self._changed = asyncio.Event()
        # Set when samples have begun, got new tokens or ended.
        self._progressed = asyncio.Event()
        self._halted = False

    async def run(self) -> None:
        """Pre-generate until cancelled or until the engine ends. A defect here only costs drafts."""
        tasks = [asyncio.create_task(each) for each in (self._read(), self._poll(), self._uploads.run())]
        if self._config.forks:
            tasks.append(asyncio.create_task(self._fork()))
        self._running = True
        try:
            await self._loop.execute(lambda: self._loop.open(self._stream))
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            # Once the engine has ended, its last reports still have to be read and stored.
            await asyncio.wait(tasks[:1], timeout=_STORE_SECONDS)
            await self._uploads.sent(_STORE_SECONDS)
            for task in done:
                task.result()
        except Unavailable:
            _log.info("pregeneration_over")
        except Exception:
            _log.exception("pregeneration_failed")
        finally:
            self._running = False
            await end(tasks)
            self._loop.call(lambda: self._loop.close(self._stream))
            await self._coordinator.leave()

    async def stored(self) -> None:
        """Return once the tokens generated so far are in the store, or storing them takes too long."""
        if not self._running:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(_STORE_SECONDS):
                await self._stream.outbox.join()
                await self._uploads.sent(_STORE_SECONDS)

    # -- reports of the engine ----------------------------------------------------------------------------

    async def _read(self) -> None:
        outbox = self._stream.outbox
        over = False
        while not over:
            report = await outbox.get()
            over = report is None
            if report is not None:
                self._take(report)
            outbox.task_done()

    def _take(self, report: BackgroundReport) -> None:
        for delta in report.deltas:
            self._leases.grow(
                delta.handle,
                delta.tokens.token_ids,
                delta.tokens.logprobs,
                delta.tokens.top_token_ids,
                delta.tokens.top_logprobs,
                self._config.fork_margin,
            )
        self._end(report.ended)
        self._store(self._leases.growing())
        if not report.engine.free or report.engine.version != self._engine.version:
            self._leases.end_forking()
        self._engine = report.engine
        self._due |= report.due
        self._changed.set()
        self._progressed.set()

    def _end(self, ends: Iterable[tuple[int, bool]]) -> None:
        """Record the ends of tasks: (handle, True if finished by itself)."""
        found = [self._leases.end(handle, finished=finished) for handle, finished in ends]
        leases = [lease for lease in found if lease is not None]
        for lease in leases:
            if not lease.fork:
                self.metrics.ended(lease.finished, len(lease.tokens))
        if rollouts := self._store(lease for lease in leases if lease.worth_storing):
            # Real samples of this instance may draft from them, too.
            loop = self._loop
            loop.call(lambda: loop.drafts.add_rollouts(rollouts, loop.samples))

    def _store(self, leases: Iterable[DraftLease]) -> list[StoredRollout]:
        rollouts = [lease.store() for lease in leases]
        self._uploads.add(rollouts)
        return rollouts

    # -- the coordinator ----------------------------------------------------------------------------------

    async def _poll(self) -> None:
        backoff = ExponentialBackoff(_FIRST_DELAY, _LONGEST_DELAY)
        while True:
            await self._until_called_for()
            began = time.monotonic()
            try:
                await self._coordinator.find()
                busy = await self._poll_once()
            except CoordinatorGone as error:
                delay = backoff.failed()
                if backoff.failures == 1:
                    _log.info("coordinator_gone", reason=str(error))
                await self._coordinator.leave()
                await self._set_asleep(False)
                await asyncio.sleep(delay)
                continue
            backoff.succeeded()
            if not busy:
                await self._until_changed(_IDLE_SECONDS - (time.monotonic() - began))

    @property
    def _situation(self) -> PollSituation:
        news = self._leases.news > self._reported_news
        due = self._due or time.monotonic() - self._polled_at > _SILENT_SECONDS
        return PollSituation(self._engine, self._leases.running, news, due, self._leases.forks)

    async def _until_called_for(self) -> None:
        while not self._situation.calls_for_poll:
            self._changed.clear()
            await self._until_changed(_SILENT_SECONDS)

    async def _until_changed(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    async def _poll_once(self) -> bool:
        """Poll and carry out the answer; return True if there is something to do now."""
        news = self._leases.news
        request = self._request()
        self._due, self._polled_at = False, time.monotonic()
        self._changed.clear()
        try:
            answer = await self._answer(request)
        except CoordinatorGone:
            self.metrics.polls.labels("failed").inc()
            raise
        self.metrics.polls.labels("interrupted" if answer is None else "answered").inc()
        if answer is None:
            return True
        self._reported_news = news
        await self._obey(answer, request)
        return self._leases.running > 0

    def _request(self) -> pb.PollWorkRequest:
        config = self._config
        return pb.PollWorkRequest(
            instance_id=config.instance_id,
            epoch=self._registration.record.epoch,
            policy_version=self._loop.policy_version,
            room=self._situation.room(self._loop.ready.result().max_running, config.background_threshold),
            progress=self._leases.progress(),
            coordinator_epoch=self._leases.epoch,
            serving=self._engine.serving,
        )

    async def _answer(self, request: pb.PollWorkRequest) -> pb.PollWorkResponse | None:
        """Return the answer; None if something happened meanwhile that should be reported first."""
        polling = asyncio.create_task(self._coordinator.poll(request, _POLL_SECONDS))
        changing = asyncio.create_task(self._changed.wait())
        try:
            await asyncio.wait({polling, changing}, return_when=asyncio.FIRST_COMPLETED)
            if request.room and self._engine.free and not polling.done():
                await asyncio.wait({polling}, timeout=_GRACE_SECONDS)
            return polling.result() if polling.done() else None
        finally:
            await end([polling, changing])

    async def _obey(self, answer: pb.PollWorkResponse, request: pb.PollWorkRequest) -> None:
        leases = self._leases
        if answer.coordinator_epoch == leases.epoch:
            leases.reported(request.progress)
        else:
            leases.void(answer.coordinator_epoch)
        self._stream.poll_steps = answer.poll_steps or POLL_STEPS
        self._halted = answer.halt or answer.sleep
        if self._halted:
            leases.end_forking()
        if answer.halt:
            await self._halt(seconds_of(answer.halted_at))
        if unwanted := leases.revoke(answer.revoked):
            await self._loop.execute(lambda: self._abort(unwanted))
        await self._set_asleep(answer.sleep)
        room = 0 if answer.halt or answer.sleep else request.room
        if tasks := leases.take(answer.tasks, request.policy_version, room):
            if self._fetcher is not None:
                self._fetches += 1
                await fetch_beginnings(self._fetcher, tasks, -self._fetches)
            await self._start(tasks)
        # There may be too many forks for the new tasks.
        self._progressed.set()

    async def _start(self, leases: Sequence[DraftLease]) -> None:
        """Start tasks or forks; those that the instance refuses end at once."""
        loop, near_ties = self._loop, self._config.forks > 0

        def start() -> list[int]:
            return [
                each.handle
                for each in leases
                if not start_task(loop, self._stream, self._terms(), each, near_ties=near_ties)
            ]

        refused = await loop.execute(start)
        self._end((handle, False) for handle in refused)

    # -- forks --------------------------------------------------------------------------------------------

    async def _fork(self) -> None:
        """Start or end forks whenever samples have changed."""
        while True:
            self._progressed.clear()
            await self._progressed.wait()
            # Forks would slow down samples of the current step.
            if not self._engine.free or self._engine.serving or self._halted:
                continue
            try:
                await self._start_forks()
            except Unavailable:
                raise
            except Exception:
                # Tasks continue, because they are worth more than forks.
                _log.exception("forking_failed")
                self._leases.end_forking()

    async def _start_forks(self) -> None:
        """Start as many forks as hardly slow the tasks down, or end forks if there are too many."""
        seats = self._situation.room(self._loop.ready.result().max_running, self._config.background_threshold)
        room = min(seats // 2, await self._loop.execute(self._affordable))
        if room < 0:
            surplus = self._leases.farthest(-room)
            await self._loop.execute(lambda: self._abort(surplus))
            return
        forks, farther = self._leases.fork(self._config.forks, room)
        if farther:
            await self._loop.execute(lambda: self._abort(farther))
        if forks:
            self.metrics.forks.inc(len(forks))
            await self._start(forks)

    def _affordable(self) -> int:
        """Return how many more forks the engine may have; negative if it has too many."""
        loop, leases = self._loop, self._leases
        return affordable(
            loop.plain_seconds, leases.running, leases.forks, self._config.fork_slowdown, loop.kv_usage
        )

    async def _halt(self, step_ended_at: float) -> None:
        """End all tasks now. `step_ended_at`: Unix seconds at which the step ended, 0 if that is not the reason."""
        ended = await self._loop.execute(self._loop.end_background)
        if ended and step_ended_at:
            # The clocks of two machines may differ a little.
            self.metrics.halts.observe(max(0.0, time.time() - step_ended_at))

    def _abort(self, handles: Iterable[int]) -> None:
        samples = self._stream.samples
        self._loop.abort_samples([samples[each] for each in handles if each in samples])

    async def _set_asleep(self, asleep: bool) -> None:
        """Leave the device to others unless there is real work, or take it back."""
        if self._loop.asleep != asleep:
            change: Callable[[], object] = self._loop.sleep if asleep else self._loop.wake
            await self._loop.execute(change)
