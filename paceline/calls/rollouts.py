"""Calls of RolloutService, and the reading of a batch.

A batch is read so that each sample comes once: the reader keeps its place, submits a lost batch again, and skips
samples that it has read before.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TypeVar

import grpc

from paceline import convert, errors
from paceline import types as t
from paceline.calls.caller import STREAM_SECONDS, Caller, RetryPolicy
from paceline.convert.values import UINT64, integer, text
from paceline.errors import (
    DataLossError,
    InvalidArgumentError,
    NotFoundError,
    PacelineError,
    UnimplementedError,
)
from paceline.transport.interface import Stream, Transport, Unary
from paceline.v1 import rollout_pb2

MOST_RENEWALS = 3
"""Submissions of a batch in a row that bring no sample before it counts as lost."""
MOST_AGAIN = 16
"""Ids that are tried for a batch that earlier trainers have acknowledged."""
MOST_SAMPLES = 64
"""Samples that one answer of a stream may have."""
ACKNOWLEDGED = "CURSOR_ACKNOWLEDGED"
"""Reason of the gateway's refusal to read from before what was acknowledged."""
_KEPT_BATCHES = 4
"""Batches that `RolloutCalls.submit` remembers, in case the gateway loses them."""

log = logging.getLogger("paceline")

R = TypeVar("R")


@dataclass(slots=True, eq=False)
class BatchReading:
    """Reading of a batch: the position in its stream, and the samples that were read.

    Cursors only ascend; they are not counts. A sample that comes again, under any cursor, is skipped.
    """

    calls: RolloutCalls
    run_id: str
    batch_id: str
    cursor: int = 0
    """Cursor of the last event read."""
    open: bool = False
    """True if samples may still be added, according to the last answer."""
    batch: t.Batch | None = None
    """The batch as it was submitted, if this client has it; it is submitted again if the gateway loses it."""
    total: int | None = None
    """Samples of the batch; None before the first answer."""
    taken: int = 0
    """Samples that were read."""
    requested: int = 0
    """Cursor of the last request."""
    acked: int = 0
    """Cursor that was acknowledged: samples before it do not come again."""
    whole_calls: bool = False
    """True: tool calls have all tokens so far."""
    _missing: int = 0
    _slots: dict[str, int] = field(default_factory=dict)
    """For each prompt the slots that were read, as bits."""
    _from_start: bool = field(init=False)
    """True if every sample that was read of the batch was read here."""
    _renewals: int = 0
    _taken_before: int = 0
    """Samples that were read when the batch was last submitted again."""
    _renamed: int = 0
    """Ids that were tried in place of `_first_id`."""
    _first_id: str = field(init=False)

    def __post_init__(self) -> None:
        self._from_start = self.cursor == 0
        self._first_id = self.batch_id

    def events(
        self, read: Callable[[rollout_pb2.StreamRolloutsResponse], Iterator[R]], turn: float | None = None
    ) -> AsyncGenerator[R, None]:
        """Iterate over what `read` returns of the answers; with `turn`, for at most that many seconds."""
        stream = Stream(
            "Rollout",
            "StreamRollouts",
            self.request,
            read,
            self.complete,
            whole=self.whole,
            begins_at_once=True,
            renew=self._renew,
        )
        return self.calls.events(stream, turn)

    def request(self) -> rollout_pb2.StreamRolloutsRequest:
        """Return the request for the events after the last one read."""
        self.requested = self.cursor
        return convert.message(
            rollout_pb2.StreamRolloutsRequest,
            run_id=self.run_id,
            batch_id=self.batch_id,
            cursor=self.cursor,
            most_samples=MOST_SAMPLES,
            whole_calls=self.whole_calls,
        )

    def read(self, answer: rollout_pb2.StreamRolloutsResponse) -> Iterator[t.SampleEvent]:
        """Yield the samples that were not read before. The cursor follows the samples that are taken."""
        self.total, self.open = answer.total, answer.open
        finished: Iterable[rollout_pb2.FinishedSample | rollout_pb2.StreamRolloutsResponse]
        finished = (*answer.earlier, answer)
        for each in finished:
            if each.cursor <= self.cursor:
                continue
            sample, slots = each.sample, self._slots.get(each.sample.prompt_id, 0)
            # Events of a later protocol have no sample and are skipped.
            is_new = each.HasField("sample") and not slots >> sample.slot & 1
            if is_new:
                self._slots[sample.prompt_id] = slots | 1 << sample.slot
                # Before the cursor, which another thread acknowledges if it was given all samples that were read.
                self.taken += 1
            self.cursor = each.cursor
            self._missing = answer.total - answer.finished
            if is_new:
                yield t.SampleEvent(each.cursor, convert.sample(sample), answer.finished, answer.total)

    def read_with_calls(
        self, answer: rollout_pb2.StreamRolloutsResponse
    ) -> Iterator[t.SampleEvent | t.SampleCall]:
        """Yield the same, and then the tool calls."""
        yield from self.read(answer)
        yield from convert.sample_calls(answer)

    def complete(self) -> bool:
        """Return True if no sample is known to be missing."""
        if self.open:
            return False
        return self.taken >= (self.total or 0) if self._from_start else self._missing <= 0

    def whole(self) -> bool:
        """Return True if every sample of the batch was read."""
        known = self.total is not None and not self.open
        return self._from_start and known and self.taken >= (self.total or 0)

    async def _renew(self, failure: PacelineError) -> bool:
        """Submit the batch again if the gateway no longer has its samples: the same seeds give the same samples.

        Return True if the stream can be opened again. DataLossError: samples are lost.
        """
        if self._from_start and self.cursor > self.acked and self._is_behind(failure):
            self.cursor = self.acked
            return failure.reason != errors.CUT_SHORT
        batch = self.batch if self._from_start else None
        if failure.reason == ACKNOWLEDGED and batch is not None:
            return await self._submit_renamed(batch)
        if not isinstance(failure, NotFoundError | DataLossError):
            return False
        if batch is None:
            if self.cursor == 0 and isinstance(failure, NotFoundError):
                # Perhaps there never was such a batch.
                return False
            raise self._lost(failure)
        self._renewals = 1 if self.taken > self._taken_before else self._renewals + 1
        self._taken_before = self.taken
        if self._renewals > MOST_RENEWALS:
            raise self._lost(failure)
        log.warning("batch %s/%s: %s; submitting it again", self.run_id, self.batch_id, failure.message)
        try:
            answer = await self._submit(batch)
        except PacelineError as error:
            raise self._lost(error) from error
        if not answer.already_submitted:
            self.acked = 0
        self.cursor = self.acked
        return True

    async def _submit_renamed(self, batch: t.Batch) -> bool:
        """Submit a batch that an earlier trainer has acknowledged under another id; return False to give up."""
        if self._renamed == MOST_AGAIN:
            return False
        self._renamed += 1
        self.batch = replace(batch, batch_id=f"{self._first_id}.again{self._renamed}")
        await self._submit(self.batch)
        self.batch_id, self.cursor, self.acked = self.batch.batch_id, 0, 0
        return True

    async def _submit(self, batch: t.Batch, queues: bool = True) -> t.Submitted:
        return await self.calls.send_batch(batch, queues=queues)

    def _is_behind(self, failure: PacelineError) -> bool:
        """Return True if missing samples must lie before the cursor, or the gateway does not know the cursor."""
        if failure.reason == errors.CUT_SHORT:
            return self.cursor == self.requested
        refused = isinstance(failure, InvalidArgumentError)
        return refused and any(violation.field == "cursor" for violation in failure.violations)

    def _lost(self, cause: PacelineError) -> DataLossError:
        return errors.batch_lost(self.run_id, self.batch_id, self.cursor, cause)


class RolloutCalls(Caller):
    """Batches, single samples, hints and rewards."""

    def __init__(
        self, transport: Transport, retry: RetryPolicy | None = None, stream_seconds: float = STREAM_SECONDS
    ) -> None:
        super().__init__(transport, retry, stream_seconds)
        self._submitted: dict[tuple[str, str], t.Batch] = {}
        """Batches that were submitted here and not yet streamed to their ends, the newest last."""
        self._acks = True
        """False: the gateway has no acknowledgements, and keeps samples until their time is over."""

    async def submit(self, batch: t.Batch) -> t.Submitted:
        """Submit a batch. Submitting the same batch again has no effect and returns the same answer."""
        batch = convert.whole_batch(batch)
        answer = await self.send_batch(batch)
        self._submitted[batch.run_id, batch.batch_id] = batch
        for key in list(self._submitted)[:-_KEPT_BATCHES]:
            self._submitted.pop(key, None)
        return answer

    async def stream(self, run_id: str, batch_id: str, cursor: int = 0) -> AsyncIterator[t.SampleEvent]:
        """Iterate over the finished samples of a batch after the cursor: in completion order, each once.

        A batch that the gateway has lost is submitted again if this client submitted it recently and `cursor` is 0.
        Otherwise DataLossError, because it is not known which samples came before the cursor.
        """
        key = text(run_id, "run_id"), text(batch_id, "batch_id")
        reading = BatchReading(self, *key, integer(cursor, "cursor", *UINT64), batch=self._submitted.get(key))
        async with aclosing(reading.events(reading.read)) as events:
            async for event in events:
                yield event
        if reading.whole():
            self._submitted.pop(key, None)

    async def ack(self, run_id: str, batch_id: str, cursor: int) -> int:
        """Acknowledge the samples up to a cursor, which are not needed again; return how many were dropped."""
        request = convert.message(
            rollout_pb2.AckRolloutsRequest, run_id=run_id, batch_id=batch_id, cursor=cursor
        )
        try:
            return int((await self.call(Unary("Rollout", "AckRollouts", request))).trimmed)
        except UnimplementedError:
            return 0

    async def send_batch(self, batch: t.Batch, *, queues: bool = True) -> t.Submitted:
        """Submit a batch without remembering it. With `queues`, wait while the gateway is full."""
        request = convert.batch_to_proto(batch, rollout_pb2.SubmitRolloutsRequest)
        answer = await self.call(Unary("Rollout", "SubmitRollouts", request), queues=queues)
        return t.Submitted(answer.batch_id, answer.samples, answer.already_submitted)

    async def open_batch(self, batch: t.Batch) -> bool:
        """Open a batch, to which groups are added afterwards; return True if it was opened before.

        The gateway closes an open batch that is neither read nor added to nor acknowledged for some time.
        """
        request = convert.batch_to_proto(batch, rollout_pb2.OpenBatchRequest)
        return bool((await self.call(Unary("Rollout", "OpenBatch", request))).already_opened)

    async def add_samples(self, run_id: str, batch_id: str, groups: Iterable[t.Group]) -> int:
        """Add groups to an open batch, all or none; return how many samples they have.

        Groups that the batch already has are skipped, so the call may be repeated. It waits while the gateway is
        full. FailedPreconditionError, reason BATCH_CLOSED or BATCH_STALE: nothing can be added any more.
        """
        messages = convert.groups_to_proto(groups)
        request = convert.message(
            rollout_pb2.AddSamplesRequest, run_id=run_id, batch_id=batch_id, groups=messages
        )
        return int((await self.call(Unary("Rollout", "AddSamples", request))).added)

    async def close_batch(self, run_id: str, batch_id: str) -> int:
        """Close a batch, so that nothing can be added; return how many samples it has. May be repeated."""
        request = convert.message(rollout_pb2.CloseBatchRequest, run_id=run_id, batch_id=batch_id)
        return int((await self.call(Unary("Rollout", "CloseBatch", request))).total)

    async def continue_samples(
        self, run_id: str, batch_id: str, continuations: Iterable[t.Continuation]
    ) -> int:
        """Continue samples that have called tools, all or none; return how many were continued for the first time.

        The call may be repeated. Samples that have ended are skipped. FailedPreconditionError, reason
        SAMPLE_NOT_CALLING: one is at another place. AlreadyExistsError: one was continued with other tokens.
        """
        messages = convert.continuations_to_proto(continuations)
        request = convert.message(
            rollout_pb2.ContinueSamplesRequest, run_id=run_id, batch_id=batch_id, continuations=messages
        )
        return int((await self.call(Unary("Rollout", "ContinueSamples", request))).continued)

    def post_ack(self, run_id: str, batch_id: str, cursor: int) -> None:
        """Acknowledge in the background. If that fails, the gateway only keeps the samples longer."""
        request = convert.message(
            rollout_pb2.AckRolloutsRequest, run_id=run_id, batch_id=batch_id, cursor=cursor
        )
        if self._acks:
            self._transport.post(Unary("Rollout", "AckRollouts", request), self._acked)

    def _acked(self, code: grpc.StatusCode) -> None:
        self._acks = self._acks and code is not grpc.StatusCode.UNIMPLEMENTED

    def generate(self, request: t.SampleRequest) -> AsyncIterator[t.TokenDelta | t.Sample]:
        """Generate one sample: iterate over deltas, then the whole sample. Leaving the iteration cancels it."""
        message = convert.sample_request_to_proto(request)
        return self.events(
            Stream("Rollout", "Generate", lambda: message, convert.generate_events, resumable=False)
        )

    async def cancel(
        self, run_id: str, batch_id: str, samples: Iterable[t.SampleKey] = (), *, keep_partial: bool = False
    ) -> int:
        """End samples of a batch (none named: all); return how many were unfinished."""
        keys = convert.keys_to_proto(samples)
        request = convert.message(
            rollout_pb2.CancelRolloutsRequest,
            run_id=run_id,
            batch_id=batch_id,
            samples=keys,
            keep_partial=keep_partial,
        )
        return int((await self.call(Unary("Rollout", "CancelRollouts", request))).cancelled)

    async def hint(self, hint: t.BatchHint) -> int:
        """Announce the prompts of a coming batch; return how many samples may be pre-generated."""
        request = convert.hint_to_proto(hint)
        return int((await self.call(Unary("Rollout", "HintNextBatch", request))).samples)

    async def report_rewards(
        self,
        run_id: str,
        batch_id: str,
        rewards: Iterable[t.Reward] = (),
        *,
        kl: float | None = None,
        clip_fraction: float | None = None,
    ) -> int:
        """Report rewards of finished samples; return how many of the samples were known.

        The policy update on this batch measured `kl` (nats per token, between the policy and the version that
        sampled) and `clip_fraction` (share of tokens whose ratio was clipped, 0 to 1). A report may be repeated.
        """
        messages = convert.rewards_to_proto(rewards)
        request = convert.message(
            rollout_pb2.ReportRewardsRequest,
            run_id=run_id,
            batch_id=batch_id,
            rewards=messages,
            kl=kl,
            clip_fraction=clip_fraction,
        )
        return int((await self.call(Unary("Rollout", "ReportRewards", request))).matched)

    async def report_single_rewards(self, run_id: str, step: int, rewards: Iterable[t.Reward]) -> int:
        """Report rewards of samples that `generate` finished in a step; return how many of them were known."""
        messages = convert.rewards_to_proto(rewards)
        request = convert.message(
            rollout_pb2.ReportRewardsRequest, run_id=run_id, step=step, rewards=messages
        )
        return int((await self.call(Unary("Rollout", "ReportRewards", request))).matched)

    async def batch(self, run_id: str, batch_id: str) -> t.BatchStatus:
        """Return the progress of a batch. NotFoundError: the gateway keeps nothing of it."""
        request = convert.message(rollout_pb2.GetBatchRequest, run_id=run_id, batch_id=batch_id)
        return convert.batch_status((await self.call(Unary("Rollout", "GetBatch", request))).batch)

    async def batches(self, run_id: str = "") -> AsyncIterator[t.BatchStatus]:
        """Iterate over the batches of a run, or of all runs, that the gateway has, in order of acceptance.

        These are the unfinished batches and the ones that finished last.
        """
        request = convert.message(rollout_pb2.ListBatchesRequest, run_id=run_id)
        while True:
            answer = await self.call(Unary("Rollout", "ListBatches", request))
            for message in answer.batches:
                yield convert.batch_status(message)
            if not answer.next_page_token:
                return
            request = convert.message(
                rollout_pb2.ListBatchesRequest, run_id=run_id, page_token=answer.next_page_token
            )

    async def end_run(self, run_id: str) -> t.RunEnded:
        """End a run: cancel its unfinished samples, and drop all samples and hints that are kept for it.

        Returns when that is done. May be repeated, and the run may begin again.
        """
        answer = await self.call(
            Unary("Rollout", "EndRun", convert.message(rollout_pb2.EndRunRequest, run_id=run_id), slow=True)
        )
        return t.RunEnded(answer.batches, answer.cancelled)
