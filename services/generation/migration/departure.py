"""Event-loop half of a move at the donor: carries out the decisions of `Donor`, sends KV, and calls the receiver.

`leaving.py` is the half that touches the engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import structlog

from paceline.internal.v1 import migration_pb2 as pb
from paceline.times import duration, seconds_of
from services.contracts.errors import Unavailable
from services.generation.kv_transfer.reason import NotMoved, Reason
from services.generation.kv_transfer.transfers import KvPart, KvSent
from services.generation.migration.leaving import DonorContext, LeavingSample
from services.generation.migration.metrics import MoveReport
from services.generation.migration.protocol import Action, Donor, Event
from services.platform.observability import tracing

_log = structlog.get_logger(__name__)
# Fewer new whole blocks than this are not worth another round of copying: they are sent while the sample is paused.
_WORTH_BLOCKS = 2
# Rounds of copying while the sample decodes: blocks that fill up during one are sent in the next.
_ROUNDS = 3
# Status codes of calls that may or may not have reached the receiver.
_UNCERTAIN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


class ReceiverRefused(NotMoved):
    """The receiver answered that it does not have the sample, and never will."""


class Departure:
    """Move of one sample with its KV. `run` never raises, and in every case the sample continues in one place."""

    def __init__(
        self, donor: DonorContext, request: pb.MoveRequest, receiver: Any, message: pb.Migration
    ) -> None:
        """Prepare a move; `receiver` is its `MigrationServiceStub`, and `message` is filled in as the report."""
        self._context = donor
        self._execute = donor.loop.execute
        self._request = request
        self._receiver = receiver
        self._report = MoveReport(message)
        self._deadline = self._report.began + (
            seconds_of(request.timeout) or donor.config.migration_timeout_seconds
        )
        self._stall = donor.config.migration_stall_seconds
        self._donor = Donor()
        # Resolves if the sample ends here during the move; True if it finished.
        self._left: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._sample = LeavingSample(donor, request, self._on_left)
        self._reserved = pb.Reservation()
        # Number of leading blocks that have been sent, or that the receiver had.
        self._sent_blocks = 0
        self._commit = pb.CommitRequest()

    async def run(self) -> pb.Migration:
        """Move the sample, and return the report."""
        try:
            actions = await self._stage(self._reserve, self._deadline)
            while actions:
                actions = [each for action in actions for each in await self._do(action)]
        except Exception as error:
            _log.exception("move_failed", migration=self._request.migration_id)
            self._donor.on(Event.FAILED, Reason.INTERNAL, repr(error))
            await self._give_up()
        finally:
            await self._clean_up()
        self._report.close(self._donor, seconds_of(self._context.loop.load.step_time))
        return self._report.message

    async def _do(self, action: Action) -> list[Action]:
        """Take an action; returns the actions that follow."""
        stall_deadline = time.monotonic() + self._stall
        match action:
            case Action.COPY:
                return await self._stage(self._copy, self._deadline)
            case Action.PAUSE:
                # Without a deadline: if it was abandoned, it would be unknown whether the sample is paused.
                return await self._stage(self._pause, None)
            case Action.SEND:
                return await self._stage(self._send, stall_deadline)
            case Action.COMMIT:
                return await self._stage(self._offer, stall_deadline)
            case Action.DECIDE:
                return await self._stage(self._decide, stall_deadline)
            case Action.RELEASE:
                return await self._stage(lambda: self._execute(self._sample.hand_over), None)
            case Action.RESUME:
                await self._execute(self._sample.resume)
                self._report.resumed()
            case Action.CANCEL:
                await self._cancel(disown=False)
            case Action.DISOWN:
                await self._cancel(disown=True)
        return []

    async def _stage(self, act: Callable[[], Awaitable[None]], deadline: float | None) -> list[Action]:
        """Run a stage until it is done, its deadline is over, or the sample ends; returns the next actions."""
        stage, began = self._donor.stage, time.monotonic()
        tracing.enter(self._report.span)
        task = asyncio.ensure_future(act())
        if deadline is None:
            await asyncio.wait([task])
        else:
            ends: set[asyncio.Future[Any]] = {task, self._left}
            seconds = max(deadline - began, 0.0)
            await asyncio.wait(ends, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        outcome = await self._outcome(task)
        self._report.passed(stage, time.monotonic() - began)
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
        return (Event.DONE, Reason.INTERNAL, "") if error is None else event_of(error)

    # -- stages -------------------------------------------------------------------------------------------

    async def _reserve(self) -> None:
        """Have the receiver reserve blocks and a seat."""
        report = self._report
        try:
            reserve = await self._execute(self._sample.describe)
        except NotMoved as error:
            # The receiver has not been called yet.
            raise ReceiverRefused(error.reason, error.message) from error
        # Longer than the donor's own deadline, because the donor cancels by itself.
        reserve.timeout.CopyFrom(duration(max(self._deadline - time.monotonic(), 0.001) + 3 * self._stall))
        report.span = tracing.begin(
            "migrate", reserve.item.trace_parent, receiver_id=self._request.receiver_id
        )
        reserve.item.trace_parent = report.span.traceparent
        tracing.enter(report.span)
        answer = await self._receiver.Reserve(reserve, timeout=seconds_of(reserve.timeout))
        if answer.WhichOneof("result") != "reserved":
            raise ReceiverRefused(Reason.of(answer.refused.reason), answer.refused.message)
        if reserve.mixed_kv and not answer.reserved.mixed_kv:
            # Its prefix cache would serve this KV to samples of the present version.
            raise NotMoved(Reason.GEOMETRY, "the receiver's release does not take KV of several versions")
        self._reserved = answer.reserved
        self._sent_blocks = report.message.shared_blocks = answer.reserved.shared_blocks

    async def _copy(self) -> None:
        """Stage 1: send whole blocks while the sample decodes, in further rounds as new ones fill up.

        No step writes to whole blocks any more. If there are none yet, this only connects.
        """
        sample, size = self._sample, self._context.geometry.block_size
        for round_ in range(_ROUNDS):
            if round_:
                await self._execute(sample.refresh)
            sent = await self._send_blocks(max(sample.exported.tokens // size, self._sent_blocks))
            self._report.message.copied_bytes = sum(each.nbytes for each in sent)
            expected = int(sample.exported.tokens + sample.rate * (time.monotonic() - sample.looked_at))
            if expected // size - self._sent_blocks < _WORTH_BLOCKS:
                return

    async def _send_blocks(self, end: int, drafters: bytes = b"") -> list[KvSent]:
        """Send the state of the drafters, and the unsent blocks before block `end`."""
        size, begin, exported = self._context.geometry.block_size, self._sent_blocks, self._sample.exported
        tokens = min(end * size, exported.tokens) - begin * size
        part = KvPart(begin * size, max(tokens, 0), exported.blocks[begin:end], drafters)
        addresses, token = self._reserved.data_addresses, self._reserved.token
        seconds = max(self._deadline - time.monotonic(), 0.0) + self._stall
        sent = await self._context.ports.send(self._request.migration_id, addresses, token, seconds, part)
        self._sent_blocks = end
        return sent

    async def _pause(self) -> None:
        self._commit, self._report.message.response_tokens = await self._execute(self._pause_sample)

    def _pause_sample(self) -> tuple[pb.CommitRequest, int]:
        """Pause the sample, start the stall, and describe the sample; runs in the engine thread."""
        self._sample.pause()
        self._report.paused()
        return self._sample.final_state()

    async def _send(self) -> None:
        """Stage 2: send the state of the drafters, then the rest of the KV."""
        drafters = self._commit.drafters.SerializeToString()
        sent = await self._send_blocks(len(self._sample.exported.blocks), drafters)
        message = self._report.message
        message.delta_bytes = sum(each.nbytes for each in sent) - message.copied_bytes
        self._commit.data_crcs.extend(each.crc for each in sent)

    async def _offer(self) -> None:
        """Ask the receiver to run the sample. ReceiverRefused if it never will."""
        answer = await self._receiver.Commit(self._commit, timeout=self._stall)
        if answer.state not in (pb.MIGRATION_STATE_COMMITTED, pb.MIGRATION_STATE_CLAIMED):
            raise ReceiverRefused(Reason.of(answer.reason), answer.message)

    async def _decide(self) -> None:
        """Ask the receiver to cancel until it answers whether it took the sample. ReceiverRefused if it did not."""
        request = pb.CancelRequest(migration_id=self._request.migration_id)
        while True:
            try:
                answer = await self._receiver.Cancel(request, timeout=self._stall / 2)
            except grpc.aio.AioRpcError as error:
                if error.code() not in _UNCERTAIN:
                    raise
                await asyncio.sleep(self._stall / 20)
                continue
            if answer.state not in (pb.MIGRATION_STATE_COMMITTED, pb.MIGRATION_STATE_CLAIMED):
                raise ReceiverRefused(
                    Reason.RECEIVER_LOST, "the receiver did not answer the commit, and has not taken it"
                )
            return

    # -- after a failure ----------------------------------------------------------------------------------

    async def _cancel(self, *, disown: bool) -> None:
        """Cancel at the receiver. If the call does not reach it, its own deadline ends the migration."""
        request = pb.CancelRequest(migration_id=self._request.migration_id, disown=disown)
        try:
            await self._receiver.Cancel(request, timeout=self._stall)
        except grpc.aio.AioRpcError as error:
            _log.info("cancel_not_heard", migration=self._request.migration_id, code=error.code().name)

    async def _give_up(self) -> None:
        """Disown the sample at the receiver after a defect; the clean-up resumes it here."""
        try:
            await self._cancel(disown=True)
        except Exception:
            _log.exception("move_not_undone", migration=self._request.migration_id)

    async def _clean_up(self) -> None:
        try:
            await self._context.ports.end(self._request.migration_id)
            if not self._donor.moved:
                await self._execute(self._sample.restore)
        except Unavailable:
            # The engine has ended, so there is nothing to restore.
            return

    def _on_left(self, finished: bool) -> None:
        """Record that the sample has ended here; called in the engine thread."""
        self._left.get_loop().call_soon_threadsafe(self._set_left, finished)

    def _set_left(self, finished: bool) -> None:
        if not self._left.done():
            self._left.set_result(finished)


def event_of(error: BaseException) -> tuple[Event, Reason, str]:
    """Return the event for an exception from a stage. One that is not a failure, as a cancellation, is raised."""
    match error:
        case ReceiverRefused():
            return Event.REFUSED, error.reason, error.message
        case NotMoved():
            event = Event.LEFT if error.reason is Reason.FINISHED else Event.FAILED
            return event, error.reason, error.message
        case Unavailable():
            return Event.LEFT, Reason.ABORTED, "the donor's engine has stopped"
        case grpc.aio.AioRpcError():
            late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            reason = Reason.DEADLINE if late else Reason.RECEIVER_LOST
            return Event.FAILED, reason, f"{error.code().name}: {error.details()}"
        case TimeoutError():
            return Event.FAILED, Reason.DEADLINE, str(error)
        case Exception():
            _log.error("move_failed", exc_info=error)
            return Event.FAILED, Reason.INTERNAL, repr(error)
    raise error
