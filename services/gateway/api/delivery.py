"""Delivery of samples to trainers: the finished samples of a batch, and the tokens of a Generate call."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field

from paceline.errors import Violation
from paceline.internal.v1.rollout_event_pb2 import SerializedEvent
from paceline.v1 import rollout_pb2 as pb
from paceline.v1 import sample_pb2
from services.contracts.errors import FailedPrecondition, InvalidArgument, Unavailable
from services.contracts.gateway_keys import BatchKey
from services.gateway.api.hints import Hinting
from services.gateway.api.intake import BatchRecovery, RolloutIntake
from services.gateway.api.validation import check_generate
from services.gateway.journal.chunks import whole
from services.gateway.journal.record import BatchRecord
from services.gateway.scheduler.active_batches import RunningBatch
from services.gateway.scheduler.turns import Pace
from services.gateway.state.calls import sample_call
from services.gateway.state.messages import final_sample

# Levels whose tokens depend on drafts or on cached rollouts.
_DRAFTED = (sample_pb2.EXACTNESS_LEVEL_LENIENT, sample_pb2.EXACTNESS_LEVEL_REJECTION)
# Samples read from the journal at a time, and the most in one event.
_CHUNK = 64
# Bytes above which an event gets no more samples: far below the size limit of messages.
MOST_BYTES = 1 << 20


@dataclass(eq=False)
class Delivery:
    """Streams to trainers, and what they acknowledge of them, for one term of leadership."""

    intake: RolloutIntake
    recovery: BatchRecovery
    hinting: Hinting
    _pace: Pace = field(init=False, default_factory=Pace)
    _numbers: Iterator[int] = field(init=False, default_factory=lambda: itertools.count(1))

    async def stream(self, request: pb.StreamRolloutsRequest) -> AsyncIterator[SerializedEvent]:
        """Yield the finished samples after the request's cursor, as they come, until all have been sent.

        Those that are there at once share events, if the caller takes several. Where there is none yet, first an
        event without one: the caller knows that its batch is worked on. Likewise at the end, if the caller does not
        know yet that nothing can be added. Tool calls come as they are made, those that wait already first.
        """
        key, cursor, most = (request.run_id, request.batch_id), request.cursor, max(1, request.most_samples)
        answered = told_end = False
        told_of, called = None, 0
        while True:
            record = await self.recovery.known(key, cursor)
            _check_cursor(record, cursor)
            self.intake.batches.use(key)
            # Before the look at the record: what comes while events are sent is not waited for.
            running = self.intake.batches.by_key.get(key)
            changed = None if running is None else running.changed.next_change()
            chunk = record.after(cursor, _CHUNK)
            payloads = await self._payloads(record, chunk)
            # Many streams may have an event in the same turn of the loop.
            await self._pace.wait()
            for event in events_of(record, chunk, payloads, most):
                yield event
                cursor, answered, told_end = event.cursor, True, not event.open
                await self._pace.wait()
            if running is not told_of:
                told_of, called = running, 0
            if running is not None and (calls := running.calls.after(called)):
                called = calls[-1][0]
                async for told in self._calls(running, calls, whole=request.whole_calls):
                    yield _event(record, cursor, told)
                answered = True
            if None in payloads:
                await self.recovery.restore(record)
            elif record.is_complete:
                if not chunk:
                    if not told_end:
                        yield _event(record, cursor)
                    return
            elif not answered:
                yield _event(record, cursor)
                answered = True
            elif len(chunk) < _CHUNK:
                if running is None or changed is None:
                    raise Unavailable(f"batch {'/'.join(key)} is not being worked on here; come again")
                with running.read():
                    await changed.wait()

    async def _calls(
        self, running: RunningBatch, calls: list[tuple[int, int]], *, whole: bool
    ) -> AsyncIterator[list[pb.SampleCall]]:
        """Yield the calls that still wait, in portions of one event."""
        told, nbytes, batch = list[pb.SampleCall](), 0, running.batch
        for _, index in calls:
            # Others may have been answered while events were sent.
            if index not in running.calls:
                continue
            told.append(sample_call(batch.samples[index], batch.group_of(index), whole=whole))
            nbytes += told[-1].ByteSize()
            if len(told) == _CHUNK or nbytes > MOST_BYTES:
                yield told
                told, nbytes = [], 0
                await self._pace.wait()
        if told:
            yield told

    async def acknowledge(self, key: BatchKey, cursor: int) -> int:
        """Let go of the samples up to `cursor`; return how many were still kept."""
        record = await self.recovery.known(key, cursor)
        self.intake.batches.use(key)
        _check_delivered(record, cursor)
        indexes = record.acknowledge(cursor)
        reached = record.acked
        trimmed = await self.intake.journal.acknowledge(record, indexes)
        record.trimmed(reached)
        self.intake.records.results.drop(key, indexes)
        return trimmed

    async def generate(self, request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
        """Yield deltas of one sample, then the whole. The sample ends on its instance when the caller goes."""
        version = request.policy_version if request.HasField("policy_version") else self.intake.version
        self.intake.check_version(version)
        if violations := check_generate(request, self.intake.limits()):
            raise InvalidArgument(violations)
        account, prompt_tokens = self.intake.account(), len(request.prompt_token_ids)
        most_tokens = 0 if account is None else account.most_tokens(prompt_tokens, request.sampling)
        with self.intake.batches.reserve(1, account, most_tokens):
            lenience = await self.intake.leniences.choose(request.run_id, request.exactness)
            key = (request.run_id, f"generate/{request.step}/{next(self._numbers)}")
            batch = self.intake.builder.from_generate(request, key, version, time.time(), lenience, account)
        self.hinting.reach(batch)
        running = self.intake.begin(batch, private=True)
        try:
            async for response in _deltas(running):
                yield response
        finally:
            self.intake.scheduler.drop(running)
        yield pb.GenerateResponse(sample=final_sample(batch, batch.endings[0]))

    async def _payloads(self, record: BatchRecord, chunk: list[tuple[int, int]]) -> list[bytes | None]:
        """Return the samples of a chunk, from memory or else from Redis."""
        found = {index: self.intake.records.payload(record.key, index) for _, index in chunk}
        missing = [index for index, payload in found.items() if payload is None]
        if missing:
            read = await self.intake.journal.events(record.key, missing)
            found.update(zip(missing, read, strict=True))
        return [found[index] for _, index in chunk]


def _event(record: BatchRecord, cursor: int, calls: Sequence[pb.SampleCall] = ()) -> SerializedEvent:
    return SerializedEvent(
        cursor=cursor, finished=record.finished, total=record.total, open=record.open, calls=calls
    )


def events_of(
    record: BatchRecord, chunk: list[tuple[int, int]], payloads: list[bytes | None], most: int
) -> Iterator[SerializedEvent]:
    """Yield events with the samples of a chunk, up to the first that is not there, at most so many in each."""
    samples, nbytes = list[tuple[int, bytes]](), 0
    for (cursor, _), payload in zip(chunk, payloads, strict=True):
        if payload is None:
            break
        if samples and (len(samples) == most or nbytes + len(payload) > MOST_BYTES):
            yield _filled(record, samples)
            samples, nbytes = [], 0
        samples.append((cursor, payload))
        nbytes += len(payload)
    if samples:
        yield _filled(record, samples)


def _filled(record: BatchRecord, samples: list[tuple[int, bytes]]) -> SerializedEvent:
    *earlier, (last, payload) = samples
    event = _event(record, last)
    event.sample = whole(payload)
    for cursor, before in earlier:
        event.earlier.add(cursor=cursor, sample=whole(before))
    return event


def _check_cursor(record: BatchRecord, cursor: int) -> None:
    _check_delivered(record, cursor)
    if cursor < record.acked:
        raise FailedPrecondition(
            "CURSOR_ACKNOWLEDGED",
            f"samples of batch {'/'.join(record.key)} up to cursor {record.acked} were acknowledged and are not "
            f"kept; a stream cannot begin after cursor {cursor}",
            acknowledged=str(record.acked),
        )


def _check_delivered(record: BatchRecord, cursor: int) -> None:
    if cursor > record.last:
        found = f"is {cursor}; no event of the batch has a cursor above {record.last}"
        raise InvalidArgument([Violation("cursor", found)])


async def _deltas(running: RunningBatch) -> AsyncIterator[pb.GenerateResponse]:
    batch, sample, sent = running.batch, running.batch.samples[0], 0
    while True:
        settled = len(sample.tokens)
        if batch.exactness.level in _DRAFTED and not batch.is_done():
            # The last token would be sampled again elsewhere, and could then be another one.
            settled -= 1
        if settled > sent:
            part = sample.part(sent, settled)
            delta = pb.TokenDelta(
                token_ids=part.tokens,
                logprobs=part.logprobs,
                top_token_ids=part.top_tokens,
                top_logprobs=part.top_logprobs,
            )
            # Counted before the yield: the sample grows while the caller is being sent this.
            sent = settled
            yield pb.GenerateResponse(delta=delta)
        elif batch.is_done():
            return
        elif running.dropped:
            raise Unavailable("this gateway no longer leads; go on from the tokens so far")
        else:
            await running.changed.wait()
