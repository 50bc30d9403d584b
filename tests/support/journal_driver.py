"""Steps of a gateway with the journal of one batch, each when a test says so."""

from __future__ import annotations

from typing import Any

from paceline.columns import ColumnSource
from paceline.internal.v1 import generation_pb2
from paceline.v1 import rollout_pb2, sample_pb2
from services.contracts.gateway_keys import BatchKeys
from services.gateway.api.intake import _rebuild
from services.gateway.journal.journal import Journal, JournalHole
from services.gateway.journal.record import (
    BatchHead,
    BatchRecord,
    JournalWrite,
    RecordedBatches,
    StoredBatch,
    collect,
    settle,
    undo,
)
from services.gateway.state.messages import BatchBuilder, build_groups
from services.gateway.state.rollout_batch import RolloutBatch
from services.gateway.state.sample import SamplePhase
from tests.support.token_columns import columns

KEY = ("run", "b")
_STOPPED = generation_pb2.Finished(finish_reason=sample_pb2.FINISH_REASON_STOP)
_BUILDER = BatchBuilder(max_seconds=1e9, max_attempts=1000)


def _request(samples: int) -> rollout_pb2.SubmitRolloutsRequest:
    request = rollout_pb2.SubmitRolloutsRequest(run_id=KEY[0], batch_id=KEY[1])
    request.groups.add(prompt_id="p", prompt_token_ids=[1, 2], samples=samples)
    return request


def _copy(request: rollout_pb2.SubmitRolloutsRequest) -> rollout_pb2.SubmitRolloutsRequest:
    return rollout_pb2.SubmitRolloutsRequest.FromString(request.SerializeToString())


def _token(index: int, place: int) -> int:
    return (index * 7919 + place * 104_729) % 151_936


def _logprob(index: int, place: int) -> float:
    return -((index * 31 + place) % 640) / 64


class JournalDriver:
    """What the gateway does with the journal of one batch, step by step; `lengths` are those of its samples."""

    def __init__(
        self,
        redis: Any,
        namespace: str,
        lengths: list[int],
        most_bytes: int,
        least_tokens: int,
        *,
        opened: bool = False,
    ) -> None:
        self.redis, self.namespace, self.lengths = redis, namespace, lengths
        self.most_bytes, self.least_tokens = most_bytes, least_tokens
        self.request, self.names = _request(len(lengths)), BatchKeys(namespace, KEY)
        self.cursor, self.delivered = 0, set[int]()
        self._begin(1)
        self.lost_answer = False
        head = BatchHead("digest", 0.0, len(lengths), None, opened)
        self.record = BatchRecord(_copy(self.request), head, 1)
        self.records.add(self.record)
        self.batch: RolloutBatch = _BUILDER.from_submission(self.request, 0.0, opened=opened)

    def _begin(self, term: int) -> None:
        self.journal = Journal(self.redis, self.namespace, term, 3600, 600)
        self.records = RecordedBatches(self.most_bytes)
        self.outstanding: JournalWrite | None = None

    async def create(self) -> None:
        request = self.record.request
        assert request is not None
        assert await self.journal.create(self.record, request.SerializeToString(deterministic=True))

    def grow(self, index: int, count: int) -> None:
        """Report tokens of a sample, and its end with the last one."""
        sample = self.batch.samples[index]
        if sample.phase is SamplePhase.ENDED:
            return
        if sample.phase is SamplePhase.WAITING:
            self.batch.assign(index, "i", 1.0)
        have = len(sample.tokens)
        places = range(have, min(have + count, self.lengths[index]))
        tokens, logprobs = [_token(index, at) for at in places], [_logprob(index, at) for at in places]
        new = columns(
            tokens,
            logprobs,
            top_token_ids=[token + 1 for token in tokens for _ in range(2)],
            top_logprobs=[-0.25, -0.5] * len(tokens),
        )
        assert self.batch.extend(index, sample.attempt, new, 2.0)
        if len(sample.tokens) == self.lengths[index]:
            self.batch.finish(index, sample.attempt, _STOPPED, 3.0)

    async def add(self, length: int, *, answered: bool = True) -> None:
        """Add a sample; the trainer repeats a call that was not answered before it makes another."""
        if not self.record.open:
            return
        if not self.lost_answer:
            self.request.groups.add(prompt_id=f"q{len(self.lengths)}", prompt_token_ids=[1, 2], samples=1)
            self.lengths.append(length)
        groups = self.record.new_groups(self.request.groups)
        self.lost_answer = not answered
        await self._add(groups, answered)

    async def _add(self, groups: list[rollout_pb2.Group], answered: bool = True) -> None:
        payload = rollout_pb2.SubmitRolloutsRequest(groups=groups).SerializeToString(deterministic=True)
        samples = sum(group.samples for group in groups)
        await self.journal.add(self.record, payload, samples)
        if answered:
            assert self.record.request is not None
            first = len(self.record.request.groups)
            made = build_groups(self.request, groups, self.batch.exactness, first, self.record.total)
            self.record.extend(groups, len(payload))
            self.batch.groups.extend(made[0])
            self.batch.samples.extend(made[1])

    async def close(self) -> None:
        """Let nothing be added any more."""
        if self.lost_answer:
            await self.add(0)
        if self.record.open:
            await self.journal.close(self.record, 5.0)
            self.record.close()
            self.batch.open = False

    async def write(self, *, answered: bool = True) -> None:
        """Write what is to be written, as the journal's writer does: again and again until there is an answer."""
        write = self.outstanding or collect(self.batch, self.record, self.least_tokens)
        if not write:
            return
        (reply,) = await self.journal.write([(write, self.record)], 4.0)
        self.outstanding = write
        if not answered:
            return
        self.outstanding = None
        if isinstance(reply, JournalHole):
            undo(self.batch, write)
            await self.look()
        else:
            settle(self.batch, self.record, write, [int(index) for index in reply])
            for ended in write.ended:
                if ended.payload:
                    self.records.keep(write.key, ended.index, ended.payload)

    async def look(self) -> None:
        """Compare what is known with what Redis has; what is lost is generated again."""
        there = await self.journal.look(self.record) or StoredBatch()
        for index in self.record.reconcile(there, lambda index: self.records.kept(KEY, index)):
            self.batch.reopen(index)

    async def restart(self) -> None:
        """Take the batch up as a later gateway does; the trainer submits or adds again what Redis has not."""
        was_open = self.record.open
        self._begin(self.journal.term + 1)
        adopted = await self.journal.adopt(KEY, with_request=True)
        if adopted is None or adopted.request is None:
            if adopted is not None:
                await self.journal.discard(KEY)
            there, head = StoredBatch(), BatchHead("digest", 0.0, len(self.lengths), None, was_open)
            self.record = BatchRecord(_copy(self.request), head, self.journal.term)
            await self.create()
        else:
            there = adopted.there
            assert list(adopted.request.groups) == self.request.groups[: len(adopted.request.groups)]
            self.record = BatchRecord(adopted.request, adopted.head, self.journal.term)
        assert self.record.reconcile(there, lambda index: None) == []
        self.records.add(self.record)
        left = [index for index in range(self.record.total) if not self.record.has_ended(index)]
        partials = await self.journal.partials(KEY, left)
        assert self.record.request is not None
        self.batch = _rebuild(_BUILDER, self.record, self.record.request, partials)
        for sample in self.batch.samples:
            self.check(sample.index, sample.columns)
        self.lost_answer = False
        if lost := self.record.new_groups(self.request.groups):
            await self._add(lost)
        if not was_open:
            await self.close()

    async def deliver(self, count: int) -> None:
        """Send the trainer what it has not, from memory or else from Redis."""
        for cursor, index in self.record.after(self.cursor, count):
            payload = self.records.payload(KEY, index)
            if payload is None:
                (payload,) = await self.journal.events(KEY, [index])
            if payload is None:
                await self.look()
                return
            sample = sample_pb2.Sample.FromString(payload)
            assert len(sample.tokens.token_ids) == self.lengths[index]
            self.check(index, sample.tokens)
            assert cursor > self.cursor
            self.cursor = cursor
            self.delivered.add(index)

    async def acknowledge(self) -> None:
        """Let go of what was delivered."""
        indexes = self.record.acknowledge(self.cursor)
        await self.journal.acknowledge(self.record, indexes)
        self.record.trimmed(self.record.acked)
        self.records.drop(KEY, indexes)

    async def end(self) -> None:
        """Go on until everything is delivered."""
        await self.close()
        for _ in range(100):
            for index, length in enumerate(self.lengths):
                self.grow(index, length)
            await self.write()
            await self.deliver(len(self.lengths))
            if self.record.is_complete and not self.record.after(self.cursor, 1):
                break
        assert self.delivered == set(range(len(self.lengths)))

    def check(self, index: int, found: ColumnSource) -> None:
        """Check that columns are of a sample's first tokens, with two of the likeliest for each."""
        tokens, logprobs = found.token_ids, found.logprobs
        assert list(found.top_token_ids) == [token + 1 for token in tokens for _ in range(2)]
        assert list(found.top_logprobs) == [-0.25, -0.5] * len(tokens)
        assert list(tokens) == [_token(index, at) for at in range(len(tokens))]
        assert list(logprobs) == [_logprob(index, at) for at in range(len(tokens))]
