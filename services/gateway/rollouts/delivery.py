"""Delivery of samples to trainers: the finished samples of a batch, and the tokens of a Generate call."""

import itertools
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

from paceline.errors import Violation
from paceline.v1 import rollout_pb2 as pb
from paceline.v1 import sample_pb2
from services.contracts.errors import FailedPrecondition, InvalidArgument, Unavailable
from services.contracts.gateway_keys import BatchKey
from services.gateway.batches.admission import check_generate
from services.gateway.batches.messages import final_sample
from services.gateway.dispatch.running_batch import RunningBatch
from services.gateway.journal.batch_record import BatchRecord
from services.gateway.journal.sample_chunks import join_spans
from services.gateway.rollouts.intake import RolloutIntake
from services.gateway.rollouts.recovery import BatchRecovery

# Levels whose tokens depend on drafts or on cached rollouts.
_DRAFTED = (sample_pb2.EXACTNESS_LEVEL_LENIENT, sample_pb2.EXACTNESS_LEVEL_REJECTION)
# Events read from the journal at a time.
_CHUNK = 16


@dataclass(eq=False)
class Delivery:
    """Streams to trainers, and what they acknowledge of them, for one term of leadership."""

    intake: RolloutIntake
    recovery: BatchRecovery
    _numbers: Iterator[int] = field(init=False, default_factory=lambda: itertools.count(1))

    async def stream(self, key: BatchKey, cursor: int) -> AsyncIterator[pb.StreamRolloutsResponse]:
        """Yield the finished samples after `cursor`, as they come, until all have been sent.

        Where there is none yet, first an event without one: the caller knows that its batch is worked on.
        """
        answered = False
        while True:
            record = await self.recovery.known(key, cursor)
            _check_cursor(record, cursor)
            chunk = record.after(cursor, _CHUNK)
            lost = False
            for (at, _), payload in zip(chunk, await self._payloads(record, chunk), strict=True):
                if payload is None:
                    lost = True
                    break
                cursor = at
                yield _event(record, cursor, payload)
                answered = True
            if lost:
                await self.recovery.restore(record)
            elif not chunk:
                if record.is_complete:
                    return
                if answered:
                    await self._await_event(record, cursor)
                else:
                    yield _event(record, cursor)
                    answered = True

    async def acknowledge(self, key: BatchKey, cursor: int) -> int:
        """Let go of the samples up to `cursor`; return how many were still kept."""
        record = await self.recovery.known(key, cursor)
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
        with self.intake.batches.reserve(1):
            lenience = await self.intake.leniences.choose(request.run_id, request.exactness)
            key = ("", f"generate-{next(self._numbers)}")
            batch = self.intake.builder.from_generate(request, key, version, time.time(), lenience)
        running = self.intake.begin(batch, private=True)
        try:
            async for response in _deltas(running):
                yield response
        finally:
            self.intake.dispatcher.drop(running)
        yield pb.GenerateResponse(sample=final_sample(batch, batch.endings[0]))

    async def _payloads(self, record: BatchRecord, chunk: list[tuple[int, int]]) -> list[bytes | None]:
        """Return the samples of a chunk, from memory or else from Redis."""
        found = {index: self.intake.records.payload(record.key, index) for _, index in chunk}
        missing = [index for index, payload in found.items() if payload is None]
        if missing:
            read = await self.intake.journal.events(record.key, missing)
            found.update(zip(missing, read, strict=True))
        return [found[index] for _, index in chunk]

    async def _await_event(self, record: BatchRecord, cursor: int) -> None:
        """Return when there may be events after `cursor`."""
        running = self.intake.batches.by_key.get(record.key)
        if running is None:
            raise Unavailable(f"batch {'/'.join(record.key)} is not being worked on here; come again")
        if not record.after(cursor, 1) and not record.is_complete:
            await running.changed.wait()


def _event(record: BatchRecord, cursor: int, payload: bytes | None = None) -> pb.StreamRolloutsResponse:
    event = pb.StreamRolloutsResponse(cursor=cursor, finished=record.finished, total=record.total)
    if payload is not None:
        event.sample.MergeFromString(payload)
        join_spans(event.sample)
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
            delta = pb.TokenDelta(
                token_ids=sample.tokens[sent:settled], logprobs=sample.logprobs[sent:settled]
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
