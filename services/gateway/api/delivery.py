"""Deliver samples to trainers: the finished samples of a batch, and the tokens of a Generate call."""

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
from services.gateway.api.intake import BatchRecovery, FleetChecks, not_in_work
from services.gateway.api.validation import check_generate
from services.gateway.journal.chunks import whole
from services.gateway.journal.fenced_records import Leniences
from services.gateway.journal.journal import Journal
from services.gateway.journal.record import BatchRecord, RecordedBatches
from services.gateway.scheduler.active_batches import ActiveBatches, RunningBatch
from services.gateway.scheduler.estimator import Coverage
from services.gateway.scheduler.scheduler import Scheduler
from services.gateway.scheduler.turns import Pace
from services.gateway.state.calls import sample_call
from services.gateway.state.messages import BatchBuilder, final_sample

# Levels whose tokens depend on drafts or on cached rollouts.
_DRAFTED = (sample_pb2.EXACTNESS_LEVEL_LENIENT, sample_pb2.EXACTNESS_LEVEL_REJECTION)
# Most samples that are read from the journal at once, and most in one event.
_CHUNK = 64
# Bytes above which an event gets no more samples: far below the size limit of messages.
MOST_BYTES = 1 << 20


@dataclass(eq=False)
class Delivery:
    """Streams of samples to trainers, and their acknowledgements, for one term of leadership."""

    checks: FleetChecks
    journal: Journal
    records: RecordedBatches
    batches: ActiveBatches
    scheduler: Scheduler
    leniences: Leniences
    builder: BatchBuilder
    recovery: BatchRecovery
    hinting: Hinting
    _pace: Pace = field(init=False, default_factory=Pace)
    _numbers: Iterator[int] = field(init=False, default_factory=lambda: itertools.count(1))

    async def stream(self, request: pb.StreamRolloutsRequest) -> AsyncIterator[SerializedEvent]:
        """Yield the finished samples after the request's cursor, as they end, until all have been sent.

        Samples that are ready at once share events, if the caller accepts several. If none is ready, the first
        event is empty, a sign that the batch is in work. The last event is empty if the caller does
        not know yet that the batch is closed. Tool calls are sent as they are made, waiting ones first.
        """
        key, cursor, most = (request.run_id, request.batch_id), request.cursor, max(1, request.most_samples)
        answered = sent_end = False
        called_in, called = None, 0
        while True:
            record = await self.recovery.known(key, cursor)
            _check_cursor(record, cursor)
            self.batches.use(key)
            # Subscribe before reading the record, so that changes during the sending of events are noticed.
            running = self.batches.by_key.get(key)
            changed = None if running is None else running.changed.next_change()
            chunk = record.after(cursor, _CHUNK)
            payloads = await self._payloads(record, chunk)
            # Many streams may have an event in the same turn of the event loop.
            await self._pace.wait()
            for event in events_of(record, chunk, payloads, most):
                yield event
                cursor, answered, sent_end = event.cursor, True, not event.open
                await self._pace.wait()
            if running is not called_in:
                called_in, called = running, 0
            if running is not None and (calls := running.calls.after(called)):
                called = calls[-1][0]
                async for part in self._calls(running, calls, whole=request.whole_calls):
                    yield _event(record, cursor, part)
                answered = True
            if None in payloads:
                await self.recovery.restore(record)
            elif record.is_complete:
                if not chunk:
                    if not sent_end:
                        yield _event(record, cursor)
                    return
            elif not answered:
                yield _event(record, cursor)
                answered = True
            elif len(chunk) < _CHUNK:
                if running is None or changed is None:
                    raise not_in_work(key)
                with running.read():
                    await changed.wait()

    async def _calls(
        self, running: RunningBatch, calls: list[tuple[int, int]], *, whole: bool
    ) -> AsyncIterator[list[pb.SampleCall]]:
        """Yield the calls that still wait, in parts of one event each."""
        part, nbytes, batch = list[pb.SampleCall](), 0, running.batch
        for _, index in calls:
            # A call may have been answered while events were sent.
            if index not in running.calls:
                continue
            part.append(sample_call(batch.samples[index], batch.group_of(index), whole=whole))
            nbytes += part[-1].ByteSize()
            if len(part) == _CHUNK or nbytes > MOST_BYTES:
                yield part
                part, nbytes = [], 0
                await self._pace.wait()
        if part:
            yield part

    async def acknowledge(self, key: BatchKey, cursor: int) -> int:
        """Release the samples up to `cursor`; return the number that was still stored."""
        record = await self.recovery.known(key, cursor)
        self.batches.use(key)
        _check_delivered(record, cursor)
        indexes = record.acknowledge(cursor)
        reached = record.acked
        trimmed = await self.journal.acknowledge(record, indexes)
        record.trimmed(reached)
        self.records.drop(key, indexes)
        return trimmed

    async def generate(self, request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
        """Yield deltas of one sample, then the whole sample. If the call ends earlier, the sample is aborted."""
        version = request.policy_version if request.HasField("policy_version") else self.checks.version
        self.checks.check_version(version)
        if violations := check_generate(request, self.checks.limits()):
            raise InvalidArgument(violations)
        account, prompt_tokens = self.checks.account(), len(request.prompt_token_ids)
        most_tokens = 0 if account is None else account.most_tokens(prompt_tokens, request.sampling)
        with self.batches.reserve(1, account, most_tokens):
            lenience = await self.leniences.choose(request.run_id, request.exactness)
            key = (request.run_id, f"generate/{request.step}/{next(self._numbers)}")
            batch = self.builder.from_generate(request, key, version, time.time(), lenience, account)
        coverage: Coverage | None = {} if self.hinting.reach(batch) else None
        running = self.recovery.begin(batch, private=True, coverage=coverage)
        try:
            async for response in _deltas(running):
                yield response
        finally:
            self.scheduler.drop(running)
        yield pb.GenerateResponse(sample=final_sample(batch, batch.endings[0]))

    async def _payloads(self, record: BatchRecord, chunk: list[tuple[int, int]]) -> list[bytes | None]:
        """Return the samples of a chunk, from memory or else from Redis."""
        found = {index: self.records.payload(record.key, index) for _, index in chunk}
        missing = [index for index, payload in found.items() if payload is None]
        if missing:
            read = await self.journal.events(record.key, missing)
            found.update(zip(missing, read, strict=True))
        return [found[index] for _, index in chunk]


def _event(record: BatchRecord, cursor: int, calls: Sequence[pb.SampleCall] = ()) -> SerializedEvent:
    return SerializedEvent(
        cursor=cursor, finished=record.finished, total=record.total, open=record.open, calls=calls
    )


def events_of(
    record: BatchRecord, chunk: list[tuple[int, int]], payloads: list[bytes | None], most: int
) -> Iterator[SerializedEvent]:
    """Group a chunk's samples into events of at most `most`; stop at the first missing sample."""
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
            f"samples of batch {'/'.join(record.key)} up to cursor {record.acked} were acknowledged and dropped; "
            f"a stream cannot begin after cursor {cursor}",
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
            # After a loss the last token is sampled again elsewhere, and could then differ.
            settled -= 1
        if settled > sent:
            delta = sample.columns.message(sent, settled)
            # Count before the yield: the sample may grow while the delta is being sent.
            sent = settled
            yield pb.GenerateResponse(delta=delta)
        elif batch.is_done():
            return
        elif running.dropped:
            raise Unavailable("this gateway no longer leads; continue from the tokens so far")
        else:
            await running.changed.wait()
