"""One move, as the donor makes it: what `donor.py` decides is done here, by event loop and engine thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
import structlog

from paceline.internal.v1 import generation_pb2
from paceline.internal.v1 import migration_pb2 as pb
from services.generation.migration import image
from services.generation.migration.account import Account
from services.generation.migration.donor import Action, Donor, Event, Fate
from services.generation.migration.failure import Refused, event_of
from services.generation.migration.place import Place, ReceiverStub, leaving
from services.generation.migration.reason import NotMoved, Reason
from services.generation.migration.shipment import Shipment
from services.generation.migration.terms import capacity_of
from services.generation.samples import RunningSample, WorkStream
from services.platform import tracing
from services.platform.errors import Unavailable

T = TypeVar("T")
_log = structlog.get_logger(__name__)
# Whole blocks that come to be full while others are sent are sent too, so often; then the sample is frozen.
_ROUNDS = 3


@dataclass(slots=True)
class Departure:
    """One sample on its way. `run` moves it and says what became of it; it does not raise.

    What `run` does last is always to let the sample go on, wherever it is.
    """

    place: Place
    request: pb.MoveRequest
    receiver: ReceiverStub
    report: pb.Migration
    _donor: Donor = field(init=False, default_factory=Donor)
    # Set when the sample has left the engine by itself; whether it had finished.
    _left: asyncio.Future[bool] = field(init=False)
    _deadline: float = field(init=False)
    _sample: RunningSample | None = field(init=False, default=None)
    _shipment: Shipment | None = field(init=False, default=None)
    # Response tokens that Reserve told.
    _told: int = field(init=False, default=0)
    _commit: pb.CommitRequest = field(init=False, default_factory=pb.CommitRequest)
    _drafters: bytes = field(init=False, default=b"")
    _account: Account = field(init=False)

    async def run(self) -> pb.Migration:
        """Move the sample."""
        self._account = Account(self.report)
        self._left = asyncio.get_running_loop().create_future()
        self._deadline = self._account.began + (self.request.timeout_seconds or self.place.limits.timeout)
        try:
            actions = await self._step(self._reserve, self._deadline)
            while actions:
                actions = [each for action in actions for each in await self._do(action)]
        except Exception as error:
            _log.exception("move_failed", migration=self.request.migration_id)
            self._donor.on(Event.FAILED, Reason.INTERNAL, repr(error))
            await self._give_up()
        finally:
            await self._clean_up()
        self._account.close(self._donor, self.place.loop.load.step_seconds)
        return self.report

    async def _do(self, action: Action) -> list[Action]:
        """Take an action; what follows from it."""
        stall = self.place.limits.stall
        match action:
            case Action.COPY:
                return await self._step(self._copy, self._deadline)
            case Action.FREEZE:
                # Not given up half-way: nobody would know whether the sample is frozen.
                return await self._step(self._freeze, None)
            case Action.SEND:
                return await self._step(self._send, time.monotonic() + stall)
            case Action.COMMIT:
                return await self._step(self._offer, time.monotonic() + stall)
            case Action.DECIDE:
                return await self._step(self._decide, time.monotonic() + stall)
            case Action.RELEASE:
                return await self._step(self._release, None)
            case Action.THAW:
                await self._thaw()
            case Action.CANCEL:
                await self._cancel(disown=False)
            case Action.DISOWN:
                await self._cancel(disown=True)
        return []

    async def _step(self, act: Callable[[], Awaitable[None]], deadline: float | None) -> list[Action]:
        """Do what a stage does, until it is done, the deadline is over, or the sample leaves; what follows."""
        stage, began = self._donor.stage, time.monotonic()
        tracing.enter(self._account.span)
        task = asyncio.ensure_future(act())
        if deadline is None:
            await asyncio.wait([task])
        else:
            ends: set[asyncio.Future[Any]] = {task, self._left}
            seconds = max(deadline - began, 0.0)
            await asyncio.wait(ends, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        outcome = await self._outcome(task)
        self._account.passed(stage, time.monotonic() - began)
        return self._donor.on(*outcome)

    async def _outcome(self, task: asyncio.Future[None]) -> tuple[Event, Reason, str]:
        done = task.done()
        if not done:
            task.cancel()
            await asyncio.wait([task])
        if self._left.done():
            _ = task.cancelled() or task.exception()
            reason = Reason.FINISHED if self._left.result() else Reason.ABORTED
            return Event.LEFT, reason, "the sample ended at its donor"
        if not done:
            return Event.FAILED, Reason.DEADLINE, f"{self._donor.stage.name} took too long"
        error = task.exception()
        if error is None:
            return Event.DONE, Reason.INTERNAL, ""
        return event_of(error)

    # -- stages -------------------------------------------------------------------------------------------

    async def _reserve(self) -> None:
        try:
            asked = await self._between_steps(self._ask)
        except NotMoved as error:
            # The receiver has not heard of it.
            raise Refused(error.reason, error.message) from error
        receiver_id = self.request.receiver_id
        span = tracing.begin("migrate", asked.item.trace_parent, receiver_id=receiver_id)
        self._account.span, asked.item.trace_parent = span, span.traceparent
        tracing.enter(span)
        answer = await self.receiver.Reserve(asked, timeout=asked.timeout_seconds)
        if answer.WhichOneof("result") != "reserved":
            raise Refused(Reason.of(answer.refused.reason), answer.refused.message)
        self._shipped.reserved(answer.reserved)
        self.report.shared_blocks = answer.reserved.shared_blocks

    def _ask(self) -> pb.ReserveRequest:
        """In the engine thread: see whether the sample can leave, watch it, and describe it."""
        place, loop = self.place, self.place.loop
        sample = leaving(loop, self.request.key)
        exported = place.engine.export(self.request.key)
        loop.watchers[self.request.key] = self._watch
        self._sample, self._told = sample, len(sample.response)
        request = sample.request
        most = min(
            len(request.prompt) + (request.sampling.max_tokens or place.max_model_len), place.max_model_len
        )
        step = loop.load.step_seconds
        rate = (1 + sample.acceptance) / step if step > 0 else 0.0
        capacity = capacity_of(len(request.prompt) + self._told, most, rate)
        self._shipment = Shipment(place, self.request.migration_id, exported, capacity, rate)
        asked = image.reserve_request(sample, self.request.migration_id, loop.policy_version)
        asked.donor_id, asked.capacity_tokens = place.instance_id, capacity
        asked.geometry.CopyFrom(place.geometry)
        # Longer than the donor tries: it cancels itself.
        asked.timeout_seconds = max(self._deadline - time.monotonic(), 0.001) + 3 * place.limits.stall
        return asked

    @property
    def _shipped(self) -> Shipment:
        assert self._shipment is not None
        return self._shipment

    async def _copy(self) -> None:
        """Stage 1: whole blocks, as long as there come to be more; at least opens the connections."""
        shipment = self._shipped
        for round_ in range(_ROUNDS):
            if round_:
                await self._between_steps(shipment.look)
            sent = await shipment.send_whole(self._seconds_to_send)
            self.report.copied_bytes = sum(each.nbytes for each in sent)
            if not shipment.may_have_grown:
                return

    @property
    def _seconds_to_send(self) -> float:
        return max(self._deadline - time.monotonic(), 0.0) + self.place.limits.stall

    async def _freeze(self) -> None:
        await self._between_steps(self._freeze_sample)

    def _freeze_sample(self) -> None:
        """In the engine thread: keep the sample out of the steps, and describe what it has become."""
        place, sample, shipment = self.place, self._sample, self._shipped
        if sample is None or self.request.key not in place.loop.samples:
            raise NotMoved(Reason.FINISHED, "the sample ended at its donor")
        shipment.check_size(len(sample.request.prompt) + len(sample.response))
        shipment.saw(place.engine.freeze(shipment.exported))
        self._account.frozen()
        states = image.drafter_states(place.loop.drafts.carry(self.request.key))
        self._drafters = states.SerializeToString()
        self.report.response_tokens = len(sample.response)
        self._commit = pb.CommitRequest(
            migration_id=self.request.migration_id,
            new_token_ids=sample.response[self._told :],
            counters=sample.finished(None, place.loop.now),
            drafters=states,
            acceptance=sample.acceptance,
            tokens_crc=image.tokens_crc(sample.response),
        )

    async def _send(self) -> None:
        """Stage 2: what the drafters know, then the rest of the KV."""
        sent = await self._shipped.send_rest(self._drafters, self._seconds_to_send)
        self.report.delta_bytes = sum(each.nbytes for each in sent) - self.report.copied_bytes
        self._commit.data_crcs.extend(each.crc for each in sent)

    async def _offer(self) -> None:
        """Commit: NotMoved when the receiver says that it will never have the sample."""
        answer = await self.receiver.Commit(self._commit, timeout=self.place.limits.stall)
        if answer.state not in (pb.MIGRATION_STATE_COMMITTED, pb.MIGRATION_STATE_CLAIMED):
            raise Refused(Reason.of(answer.reason), answer.message)

    async def _decide(self) -> None:
        """Have the receiver say whether it took the sample, as often as there is time."""
        asked = pb.CancelRequest(migration_id=self.request.migration_id)
        while True:
            try:
                answer = await self.receiver.Cancel(asked, timeout=self.place.limits.stall / 2)
            except grpc.aio.AioRpcError as error:
                if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                    raise
                await asyncio.sleep(self.place.limits.stall / 20)
                continue
            if answer.state not in (pb.MIGRATION_STATE_COMMITTED, pb.MIGRATION_STATE_CLAIMED):
                raise Refused(
                    Reason.RECEIVER_LOST, "the receiver did not answer the commit, and has not taken it"
                )
            return

    async def _release(self) -> None:
        await self._between_steps(self._hand_over)

    def _hand_over(self) -> None:
        """In the engine thread: end the sample here, and tell its stream where it is."""
        loop, sample = self.place.loop, self._sample
        if sample is None or self.request.key not in loop.samples:
            raise NotMoved(Reason.FINISHED, "the sample ended at its donor")
        loop.watchers.pop(self.request.key, None)
        stream = sample.stream
        loop.release(self.request.key)
        if isinstance(stream, WorkStream):
            stream.move(sample, self._moved(sample))
        loop.flush()

    def _moved(self, sample: RunningSample) -> generation_pb2.Moved:
        return generation_pb2.Moved(
            handle=sample.handle,
            migration_id=self.request.migration_id,
            instance_id=self.request.receiver_id,
            address=self.request.receiver_address,
            response_tokens=len(sample.response),
        )

    # -- the way back -------------------------------------------------------------------------------------

    async def _thaw(self) -> None:
        await self._between_steps(lambda: self.place.engine.thaw(self.request.key))
        self._account.resumed()

    async def _cancel(self, *, disown: bool) -> None:
        """Tell the receiver. One that does not hear it finds out by its own deadline."""
        asked = pb.CancelRequest(migration_id=self.request.migration_id, disown=disown)
        try:
            await self.receiver.Cancel(asked, timeout=self.place.limits.stall)
        except grpc.aio.AioRpcError as error:
            _log.info("cancel_not_heard", migration=self.request.migration_id, code=error.code().name)

    async def _give_up(self) -> None:
        """After a defect: nothing may come of it at the receiver. What is frozen is thawed by the clean-up."""
        try:
            await self._cancel(disown=True)
        except Exception:
            _log.exception("move_not_undone", migration=self.request.migration_id)

    async def _clean_up(self) -> None:
        try:
            await self.place.ports.end(self.request.migration_id)
            if self._donor.fate is not Fate.MOVED:
                await self._between_steps(self._restore)
        except Unavailable:
            # The engine has ended, and with it everything that was held.
            return

    def _restore(self) -> None:
        """In the engine thread: however the move ended, a sample that is still here decodes on.

        One that another move has is left as it is: thawed, it would decode here while it is on its way.
        """
        if self.place.loop.watchers.get(self.request.key) == self._watch:
            del self.place.loop.watchers[self.request.key]
            self.place.engine.thaw(self.request.key)

    def _watch(self, finished: bool) -> None:
        """In the engine thread: the sample has left the engine."""
        self._left.get_loop().call_soon_threadsafe(self._leave, finished)

    def _leave(self, finished: bool) -> None:
        if not self._left.done():
            self._left.set_result(finished)

    async def _between_steps(self, act: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self.place.loop.call(act))
