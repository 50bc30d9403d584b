"""Round trips of the journal writer: changes share them, and the last ends of a batch wait for nobody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from services.contracts.gateway_keys import BatchKey
from services.gateway.journal import writer
from services.gateway.journal.record import BatchRecord, JournalWrite, RecordedBatches
from services.gateway.journal.writer import JournalBacklog, JournalWriter
from services.gateway.metrics import GatewayMetrics
from services.gateway.state.rollout_batch import RolloutBatch
from services.gateway.state.sample import EventEffect
from services.platform.tasks import Notifier
from tests.support.token_columns import columns
from tests.unit.gateway.scheduler_parts import LONG, a_batch, finished, record_of, tokens, turn


@dataclass
class TakingJournal:
    """Stands for Redis: takes every write. `trips` has the batches of each round trip."""

    trips: list[list[BatchKey]] = field(default_factory=list)
    changed: Notifier = field(default_factory=Notifier)

    async def write(self, pieces: Sequence[tuple[JournalWrite, BatchRecord]], now: float) -> list[Any]:
        self.trips.append([write.key for write, _ in pieces])
        self.changed.notify()
        return [[] for _ in pieces]

    async def until(self, count: int) -> None:
        async with asyncio.timeout(60):
            while len(self.trips) < count:
                await self.changed.wait()


class NoReader:
    """Follows nothing."""

    def journaled(self, key: BatchKey, events: int) -> None: ...
    def extended(self, key: BatchKey, tokens: Iterable[tuple[int, float]]) -> None: ...
    def reopen(self, key: BatchKey, indexes: list[int]) -> None: ...
    def taken(self, key: BatchKey) -> None: ...


class Written:
    """A writer at work, and batches whose samples end at once."""

    def __init__(self) -> None:
        metrics = GatewayMetrics(CollectorRegistry())
        self.journal, self.records = TakingJournal(), RecordedBatches(1 << 20)
        journal: Any = self.journal
        self.writer = JournalWriter(journal, self.records, JournalBacklog(1 << 20, metrics), metrics, 1)

    def begin(self, batch_id: str, samples: int) -> RolloutBatch:
        batch = a_batch(samples, batch_id=batch_id)
        self.records.add(record_of(batch))
        for index in range(samples):
            batch.assign(index, "a", 0.0)
        return batch

    def end(self, batch: RolloutBatch, index: int) -> None:
        delta, end = tokens(1, 5).deltas[0], finished(1).finished[0]
        assert batch.extend(index, 1, columns(delta.tokens.token_ids, delta.tokens.logprobs), 1.0)
        assert batch.finish(index, 1, end, 1.0) is EventEffect.ENDED
        self.writer.touch(batch)


@pytest.fixture
async def written(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Written]:
    monkeypatch.setattr(writer, "_PAUSE", LONG)
    async with _running(Written()) as made:
        yield made


@asynccontextmanager
async def _running(made: Written) -> AsyncIterator[Written]:
    running = asyncio.create_task(made.writer.run(NoReader()))
    try:
        yield made
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_the_last_ends_of_a_batch_do_not_wait_for_others_to_share_their_round_trip(
    written: Written,
) -> None:
    batch = written.begin("b", 3)
    written.end(batch, 0)
    await written.journal.until(1)
    written.end(batch, 1)
    for _ in range(20):
        await turn()
    assert len(written.journal.trips) == 1
    written.end(batch, 2)
    await written.journal.until(2)
    record = written.records.get(batch.key)
    assert record is not None
    assert record.finished == 3
    assert not batch.endings


async def test_ends_of_several_batches_share_a_round_trip(written: Written) -> None:
    first, *batches = (written.begin(f"b{number}", 1) for number in range(4))
    written.end(first, 0)
    await written.journal.until(1)
    open_still = written.begin("long", 2)
    written.end(open_still, 0)
    for batch in batches:
        written.end(batch, 0)
    for _ in range(20):
        await turn()
    assert written.journal.trips == [[first.key]]


async def test_a_hurry_is_over_with_its_round_trip(written: Written) -> None:
    ended, batch = written.begin("a", 1), written.begin("b", 2)
    written.end(ended, 0)
    await written.journal.until(1)
    written.end(batch, 0)
    for _ in range(20):
        await turn()
    assert written.journal.trips == [[ended.key]]
