"""Calls of RolloutService, and the reading of a batch.

A batch is read so that each sample comes once: the reader keeps its place, submits a lost batch again, and skips
samples that it has read before.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import grpc

from paceline import convert, errors
from paceline import errors as client_errors
from paceline import types as t
from paceline.calls.caller import STREAM_SECONDS, Caller, RetryPolicy
from paceline.convert.values import UINT64, integer, text
from paceline.errors import UnimplementedError
from paceline.transport.interface import Stream, Transport, Unary
from paceline.v1 import rollout_pb2, sample_pb2

MOST_RENEWALS = 3
"""Submissions of a batch in a row that bring no sample before it counts as lost."""
MOST_AGAIN = 16
"""Ids that are tried for a batch that was acknowledged by trainers before this one."""
MOST_SAMPLES = 64
"""Samples that one answer of a stream may have."""
ACKNOWLEDGED = "CURSOR_ACKNOWLEDGED"
"""Reason of the gateway's refusal to read from before what was acknowledged."""

log = logging.getLogger("paceline")


@dataclass(slots=True)
class BatchPlace:
    """Position in the stream of a batch, and the samples that were read.

    Cursors only ascend: they are not counted with. A sample that comes again, under any cursor, is passed over.
    """

    run_id: str
    batch_id: str
    cursor: int = 0
    total: int | None = None
    """Samples of the batch, as far as it is known."""
    taken: int = 0
    """Samples that were read."""
    asked: int = 0
    """Cursor of the last request."""
    acked: int = 0
    """Cursor that was acknowledged: what is before it does not come again."""
    open: bool = False
    """Samples may still be added, as far as known."""
    _missing: int = 0
    _slots: dict[str, int] = field(default_factory=dict)
    """For each prompt the slots that were read, as bits."""
    _from_start: bool = field(init=False)

    def __post_init__(self) -> None:
        self._from_start = self.cursor == 0

    @property
    def knows_all(self) -> bool:
        """True if every sample that was ever read of the batch was read here."""
        return self._from_start

    def request(self) -> rollout_pb2.StreamRolloutsRequest:
        """Return the request for the events after the last one read."""
        self.asked = self.cursor
        return convert.message(
            rollout_pb2.StreamRolloutsRequest,
            run_id=self.run_id,
            batch_id=self.batch_id,
            cursor=self.cursor,
            most_samples=MOST_SAMPLES,
        )

    def read(self, answer: rollout_pb2.StreamRolloutsResponse) -> Iterator[t.SampleEvent]:
        """Yield the samples that were not read before. The place follows those that were taken."""
        self.total, self.open = answer.total, answer.open
        for each in answer.earlier:
            yield from self._read(answer, each.cursor, each.sample)
        # Events of a later protocol are passed over.
        yield from self._read(answer, answer.cursor, answer.sample if answer.HasField("sample") else None)

    def _read(
        self, answer: rollout_pb2.StreamRolloutsResponse, cursor: int, sample: sample_pb2.Sample | None
    ) -> Iterator[t.SampleEvent]:
        if cursor <= self.cursor:
            return
        self.cursor = cursor
        self._missing = answer.total - answer.finished
        if sample is not None and self._take(sample.prompt_id, sample.slot):
            yield t.SampleEvent(cursor, convert.sample(sample), answer.finished, answer.total)

    def complete(self) -> bool:
        """Return True if no sample is known to be missing."""
        if self.open:
            return False
        return self.taken >= (self.total or 0) if self._from_start else self._missing <= 0

    def whole(self) -> bool:
        """Return True if every sample of the batch was read."""
        known = self.total is not None and not self.open
        return self._from_start and known and self.taken >= (self.total or 0)

    def _take(self, prompt_id: str, slot: int) -> bool:
        """Count a sample; return False if it was read before."""
        before = self._slots.get(prompt_id, 0)
        after = before | 1 << slot
        if after == before:
            return False
        self._slots[prompt_id] = after
        self.taken += 1
        return True


@dataclass(slots=True, eq=False)
class BatchReading:
    """Reads a batch; `batch` is what was submitted, if this client has it, and `submit` submits it again."""

    place: BatchPlace
    batch: t.Batch | None
    submit: Callable[[t.Batch], Awaitable[t.Submitted]]
    _renewals: int = 0
    _taken: int = 0
    _again: int = 0
    _named: str = ""

    def stream(self) -> Stream[t.SampleEvent]:
        """Return the stream from here on."""
        place = self.place
        return Stream(
            "Rollout",
            "StreamRollouts",
            place.request,
            place.read,
            place.complete,
            whole=place.whole,
            begins_at_once=True,
            renew=self.renew,
        )

    def stream_with_calls(self, *, whole: bool) -> Stream[t.SampleEvent | t.SampleCall]:
        """Return the stream from here on with tool calls; `whole` ones have all tokens so far."""

        def request() -> rollout_pb2.StreamRolloutsRequest:
            message = self.place.request()
            message.whole_calls = whole
            return message

        def read(answer: rollout_pb2.StreamRolloutsResponse) -> Iterator[t.SampleEvent | t.SampleCall]:
            yield from self.place.read(answer)
            yield from convert.sample_calls(answer)

        place = self.place
        return Stream(
            "Rollout",
            "StreamRollouts",
            request,
            read,
            place.complete,
            whole=place.whole,
            begins_at_once=True,
            renew=self.renew,
        )

    async def renew(self, failure: errors.PacelineError) -> bool:
        """Submit the batch again, if the gateway has not its samples: the same ones come of the same seeds.

        DataLossError if that is impossible.
        """
        place = self.place
        if place.knows_all and place.cursor > place.acked and _is_behind(failure, place):
            place.cursor = place.acked
            return failure.reason != errors.CUT_SHORT
        if failure.reason == ACKNOWLEDGED and self.batch is not None and place.knows_all:
            return await self._begin_again(self.batch)
        if not isinstance(failure, errors.NotFoundError | errors.DataLossError):
            return False
        if self.batch is None or not place.knows_all:
            if place.cursor == 0 and isinstance(failure, errors.NotFoundError):
                # Perhaps there never was such a batch.
                return False
            raise self._lost(failure)
        self._renewals = 1 if place.taken > self._taken else self._renewals + 1
        self._taken = place.taken
        if self._renewals > MOST_RENEWALS:
            raise self._lost(failure)
        log.warning("batch %s/%s: %s; submitting it again", place.run_id, place.batch_id, failure.message)
        try:
            answer = await self.submit(self.batch)
        except errors.PacelineError as error:
            raise self._lost(error) from error
        if not answer.already_submitted:
            place.acked = 0
        place.cursor = place.acked
        return True

    async def _begin_again(self, batch: t.Batch) -> bool:
        """Submit under another id what a trainer before this one has acknowledged."""
        if self._again == MOST_AGAIN:
            return False
        self._again += 1
        self._named = self._named or batch.batch_id
        self.batch = replace(batch, batch_id=f"{self._named}.again{self._again}")
        await self.submit(self.batch)
        self.place.batch_id, self.place.cursor, self.place.acked = self.batch.batch_id, 0, 0
        return True

    def _lost(self, cause: errors.PacelineError) -> errors.DataLossError:
        place = self.place
        return client_errors.batch_lost(place.run_id, place.batch_id, place.cursor, cause)


def _is_behind(failure: errors.PacelineError, place: BatchPlace) -> bool:
    """Return True if what is missing must lie before the cursor, or the gateway does not know the cursor."""
    if failure.reason == errors.CUT_SHORT:
        return place.cursor == place.asked
    refused = isinstance(failure, errors.InvalidArgumentError)
    return refused and any(violation.field == "cursor" for violation in failure.violations)


# Batches kept for the case that the gateway loses them.
_KEPT_BATCHES = 4


class RolloutCalls(Caller):
    """Batches, single samples, hints and rewards."""

    def __init__(
        self, transport: Transport, retry: RetryPolicy | None = None, stream_seconds: float = STREAM_SECONDS
    ) -> None:
        super().__init__(transport, retry, stream_seconds)
        self._submitted: dict[tuple[str, str], t.Batch] = {}
        """Batches that were submitted here and not yet streamed to their ends, the newest last."""
        self._acks = True
        """False: the gateway keeps samples until their time is over."""

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

        A batch that the gateway has lost is submitted again, if this client has submitted it lately and `cursor` is
        0. Otherwise DataLossError: of the samples before the cursor nobody knows which they were.
        """
        key = text(run_id, "run_id"), text(batch_id, "batch_id")
        place = BatchPlace(*key, integer(cursor, "cursor", *UINT64))
        reading = BatchReading(place, self._submitted.get(key), self.send_batch)
        async with aclosing(self.events(reading.stream())) as events:
            async for event in events:
                yield event
        if place.whole():
            self._submitted.pop(key, None)

    async def ack(self, run_id: str, batch_id: str, cursor: int) -> int:
        """Tell the gateway that the samples up to a cursor are not needed again; return how many it dropped."""
        request = convert.message(
            rollout_pb2.AckRolloutsRequest, run_id=run_id, batch_id=batch_id, cursor=cursor
        )
        try:
            return int((await self.call(Unary("Rollout", "AckRollouts", request))).trimmed)
        except UnimplementedError:
            return 0

    async def send_batch(self, batch: t.Batch, *, queues: bool = True) -> t.Submitted:
        """Submit a batch and do not remember it. With `queues`, wait while the gateway is full."""
        request = convert.batch_to_proto(batch)
        unary = Unary("Rollout", "SubmitRollouts", request)
        return convert.submitted(await self.call(unary, queues=queues))

    async def open_batch(self, batch: t.Batch) -> bool:
        """Open a batch, to which its groups are added afterwards; return True if it was open, or had been, already.

        While a batch is open and not read, added to or acknowledged, the gateway closes it after some time.
        """
        unary = Unary("Rollout", "OpenBatch", convert.opening_to_proto(batch))
        return bool((await self.call(unary)).already_opened)

    async def add_samples(self, run_id: str, batch_id: str, groups: Iterable[t.Group]) -> int:
        """Add groups to an open batch, all or none; return how many samples they have.

        Groups that the batch has already are passed over: the call may be repeated. It waits while the gateway is
        full. FailedPreconditionError, reason BATCH_CLOSED or BATCH_STALE: nothing can be added any more.
        """
        messages = convert.groups_to_proto(groups)
        request = convert.message(
            rollout_pb2.AddSamplesRequest, run_id=run_id, batch_id=batch_id, groups=messages
        )
        return int((await self.call(Unary("Rollout", "AddSamples", request))).added)

    async def close_batch(self, run_id: str, batch_id: str) -> int:
        """Let nothing be added to a batch any more; return how many samples it has. May be repeated."""
        request = convert.message(rollout_pb2.CloseBatchRequest, run_id=run_id, batch_id=batch_id)
        return int((await self.call(Unary("Rollout", "CloseBatch", request))).total)

    async def continue_samples(
        self, run_id: str, batch_id: str, continuations: Iterable[t.Continuation]
    ) -> int:
        """Go on with samples that have called tools, all or none; return how many had not gone on so before.

        The call may be repeated. Samples that have ended are passed over. FailedPreconditionError, reason
        SAMPLE_NOT_CALLING: one is at another place. AlreadyExistsError: one went on with other tokens.
        """
        messages = convert.continuations_to_proto(continuations)
        request = convert.message(
            rollout_pb2.ContinueSamplesRequest, run_id=run_id, batch_id=batch_id, continuations=messages
        )
        return int((await self.call(Unary("Rollout", "ContinueSamples", request))).continued)

    def post_ack(self, run_id: str, batch_id: str, cursor: int) -> None:
        """Acknowledge in the background. Without effect where it fails: the gateway keeps the samples longer."""
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
        """Report rewards of finished samples of `generate` of a step; return how many of them were known."""
        messages = convert.rewards_to_proto(rewards)
        request = convert.message(
            rollout_pb2.ReportRewardsRequest, run_id=run_id, step=step, rewards=messages
        )
        return int((await self.call(Unary("Rollout", "ReportRewards", request))).matched)

    async def batch(self, run_id: str, batch_id: str) -> t.BatchStatus:
        """Return how far a batch is. NotFoundError: the gateway keeps nothing of it."""
        request = convert.message(rollout_pb2.GetBatchRequest, run_id=run_id, batch_id=batch_id)
        return convert.batch_status((await self.call(Unary("Rollout", "GetBatch", request))).batch)

    async def batches(self, run_id: str = "") -> AsyncIterator[t.BatchStatus]:
        """Iterate over the batches of a run (none named: of all) that the gateway has, in order of acceptance.

        They are those in work, and the last ones that have finished.
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
        """End a run: cancel its unfinished samples, and let go of all samples and hints that are kept for it.

        Returns when that is done. It may be repeated, and the run may begin again.
        """
        answer = await self.call(
            Unary("Rollout", "EndRun", convert.message(rollout_pb2.EndRunRequest, run_id=run_id), slow=True)
        )
        return t.RunEnded(answer.batches, answer.cancelled)
