"""Pre-generation of one instance: asks the coordinator for items, keeps track of them, and stores what they give.

Two tasks of the event loop: one reads what the engine thread reports, the other polls. What must be fast does not
pass through here: the engine thread itself ends background samples, the moment a real one comes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from contextlib import suppress

import structlog

from paceline.internal.v1 import bubble_pb2 as pb
from services.drafts.rollout import Rollout
from services.generation.pregeneration.coordinator import Coordinator, CoordinatorGone
from services.generation.pregeneration.leases import Lease, Leases
from services.generation.pregeneration.metrics import PregenerationMetrics
from services.generation.pregeneration.polling import Situation, pause
from services.generation.pregeneration.puts import PutQueue
from services.generation.pregeneration.seat import Seat
from services.generation.pregeneration.stream import POLL_STEPS, Report, Standing
from services.platform.errors import Unavailable
from services.platform.tasks import end

_log = structlog.get_logger(__name__)

# An instance that has items is heard of at least this often, however long its steps are.
_SILENT_SECONDS = 3.0
# The coordinator holds a poll back for less than this.
_POLL_SECONDS = 30.0
# How long an answer with items may still come when there is something newer to say: cancelled, they are lost.
_GRACE_SECONDS = 0.1
# From one poll of an idle instance to the next, when the first brought nothing.
_IDLE_SECONDS = 0.25
# After failures in a row, the first and the most.
_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.25, 2.0
# What an update, or the end of the process, waits for the drafts to be stored.
_STORE_SECONDS = 1.0


class Pregenerator:
    """What an instance does in bubbles.

    Usage: `run` in a task of its own; `stored` before an update, or the process, is done.
    """

    def __init__(
        self, seat: Seat, coordinator: Coordinator, puts: PutQueue, metrics: PregenerationMetrics
    ) -> None:
        self._seat = seat
        self._coordinator = coordinator
        self._puts = puts
        self.metrics = metrics
        self._leases = Leases()
        self._standing = Standing()
        self._due = False
        self._running = False
        self._polled_at = 0.0
        # News of the leases that the coordinator knows.
        self._told = 0
        # Set when something happens that a poll under way does not know of.
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Pre-generate until cancelled or until the engine ends. A defect here costs drafts, nothing else."""
        tasks = [asyncio.create_task(each) for each in (self._read(), self._poll(), self._puts.run())]
        self._running = True
        try:
            await self._seat.open()
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            # When the engine has ended its last words are still to be read, and stored.
            await asyncio.wait(tasks[:1], timeout=_STORE_SECONDS)
            await self._puts.sent(_STORE_SECONDS)
            for task in done:
                task.result()
        except Unavailable:
            _log.info("pregeneration_over")
        except Exception:
            _log.exception("pregeneration_failed")
        finally:
            self._running = False
            await end(tasks)
            self._seat.close()
            await self._coordinator.leave()

    async def stored(self) -> None:
        """Return when what was generated so far is in the store, or would take too long to get there."""
        if not self._running:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(_STORE_SECONDS):
                await self._seat.stream.outbox.join()
                await self._puts.sent(_STORE_SECONDS)

    # -- what the engine reports --------------------------------------------------------------------------

    async def _read(self) -> None:
        outbox = self._seat.stream.outbox
        over = False
        while not over:
            report = await outbox.get()
            over = report is None
            if report is not None:
                self._take(report)
            outbox.task_done()

    def _take(self, report: Report) -> None:
        for grown in report.grown:
            self._leases.grow(grown.handle, grown.tokens, grown.logprobs)
        self._end((each.handle, each.finished) for each in report.ended)
        self._store(self._leases.growing())
        self._standing = report.standing
        self._due |= report.due
        self._changed.set()

    def _end(self, ends: Iterable[tuple[int, bool]]) -> None:
        """Items have ended, by handle: by themselves, or not."""
        found = [self._leases.end(handle, finished=finished) for handle, finished in ends]
        leases = [lease for lease in found if lease is not None]
        for lease in leases:
            self.metrics.ended(lease.finished, len(lease.tokens))
        if rollouts := self._store(lease for lease in leases if lease.worth_storing):
            self._seat.keep(rollouts)

    def _store(self, leases: Iterable[Lease]) -> list[Rollout]:
        rollouts = [lease.store() for lease in leases]
        self._puts.add(rollouts)
        return rollouts

    # -- the coordinator ----------------------------------------------------------------------------------

    async def _poll(self) -> None:
        failures = 0
        while True:
            await self._until_called_for()
            began = time.monotonic()
            try:
                await self._coordinator.find()
                busy = await self._ask()
            except CoordinatorGone as error:
                failures += 1
                if failures == 1:
                    _log.info("coordinator_gone", reason=str(error))
                await self._coordinator.leave()
                await self._seat.wake()
                await asyncio.sleep(pause(failures, _PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS))
                continue
            failures = 0
            if not busy:
                await self._rest(_IDLE_SECONDS - (time.monotonic() - began))

    @property
    def _situation(self) -> Situation:
        news = self._leases.news > self._told
        due = self._due or time.monotonic() - self._polled_at > _SILENT_SECONDS
        return Situation(self._standing, self._leases.running, news, due)

    async def _until_called_for(self) -> None:
        while not self._situation.calls_for_poll:
            self._changed.clear()
            await self._rest(_SILENT_SECONDS)

    async def _rest(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    async def _ask(self) -> bool:
        """One poll, and what it says; whether there is something to do now."""
        news = self._leases.news
        request = self._request()
        self._due, self._polled_at = False, time.monotonic()
        self._changed.clear()
        try:
            answer = await self._answer(request)
        except CoordinatorGone:
            self.metrics.polled("failed")
            raise
        self.metrics.polled("interrupted" if answer is None else "answered")
        if answer is None:
            return True
        self._told = news
        await self._obey(answer, request)
        return self._leases.running > 0

    def _request(self) -> pb.PollWorkRequest:
        seat, situation = self._seat, self._situation
        return pb.PollWorkRequest(
            instance_id=seat.instance_id,
            epoch=seat.epoch,
            policy_version=seat.policy_version,
            room=situation.room(seat.seats, seat.reserved),
            progress=self._leases.progress(),
            coordinator_epoch=self._leases.epoch,
            serving=self._standing.serving,
        )

    async def _answer(self, request: pb.PollWorkRequest) -> pb.PollWorkResponse | None:
        """The answer; None when something happened meanwhile that makes another request better."""
        asking = asyncio.create_task(self._coordinator.poll(request, _POLL_SECONDS))
        changing = asyncio.create_task(self._changed.wait())
        try:
            await asyncio.wait({asking, changing}, return_when=asyncio.FIRST_COMPLETED)
            if request.room and self._standing.free and not asking.done():
                await asyncio.wait({asking}, timeout=_GRACE_SECONDS)
            return asking.result() if asking.done() else None
        finally:
            await end([asking, changing])

    async def _obey(self, answer: pb.PollWorkResponse, request: pb.PollWorkRequest) -> None:
        leases, seat = self._leases, self._seat
        if answer.coordinator_epoch == leases.epoch:
            leases.told(request.progress)
        else:
            leases.void(answer.coordinator_epoch)
        seat.stream.poll_steps = answer.poll_steps or POLL_STEPS
        if answer.halt:
            await self._halt(answer.halted_at)
        if unwanted := leases.revoke(answer.revoked):
            await seat.end(unwanted)
        await (seat.sleep() if answer.sleep else seat.wake())
        room = 0 if answer.halt or answer.sleep else request.room
        fresh = leases.take(answer.items, request.policy_version, room)
        refused = await seat.start(fresh)
        self._end((handle, False) for handle in refused)

    async def _halt(self, barrier: float) -> None:
        """Stop now; `barrier` is when the step ended, in unix seconds, 0 when that is not why."""
        ended = await self._seat.end_all()
        if ended and barrier:
            self.metrics.halted(time.time() - barrier)
