"""The queue to the draft store: bounded, oldest dropped first, patient with outages, never in the way."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from paceline.internal.v1 import generation_pb2
from paceline.v1 import sample_pb2
from services.contracts.rollout import StoredRollout
from services.gateway.feeds import history as module
from services.gateway.feeds.history import HistoryWriter
from services.gateway.metrics import GatewayMetrics
from services.gateway.state.rollout_batch import RolloutBatch
from services.gateway.state.sample import BatchGroup, GatewaySample
from services.platform.tasks import end
from tests.support.token_columns import columns


class Store:
    """Remembers what it is given; `gate` holds puts up, `available` and `lost` fail them."""

    def __init__(self) -> None:
        self.available = True
        self.lost = False
        self.puts: list[list[int]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.entered = asyncio.Event()

    async def put(self, rollouts: Sequence[StoredRollout]) -> int:
        self.entered.set()
        await self.gate.wait()
        if self.lost:
            self.available = False
            return 0
        self.puts.append([rollout.slot for rollout in rollouts])
        return len(rollouts)

    @property
    def slots(self) -> list[int]:
        return [slot for put in self.puts for slot in put]


class Feed:
    """A history with a store, and samples that end."""

    def __init__(self, most_waiting: int = 1 << 20) -> None:
        self.store = Store()
        self.registry = CollectorRegistry()
        self.history = HistoryWriter(cast(Any, self.store), GatewayMetrics(self.registry), most_waiting)

    def finish(self, slot: int, tokens: int = 10) -> None:
        """End a sample that is a batch of its own."""
        self.end(self.begin(slot), 0, tokens)

    def begin(self, *slots: int) -> RolloutBatch:
        states = [GatewaySample(index, 0, slot, slot) for index, slot in enumerate(slots)]
        group = BatchGroup("p", [1], sample_pb2.SamplingParams(), count=len(slots))
        batch = RolloutBatch(("run", "b"), 0, [group], sample_pb2.Exactness(), states, 0.0, 1.0, 1)
        batch.cached_run = "run"
        return batch

    def end(self, batch: RolloutBatch, index: int, tokens: int = 10) -> None:
        attempt = batch.assign(index, "i0", 0.0)
        batch.extend(index, attempt, columns([1] * tokens, [-1.0] * tokens), 0.0)
        report = generation_pb2.Finished(finish_reason=sample_pb2.FINISH_REASON_STOP)
        batch.finish(index, attempt, report, 0.0)
        self.history.offer(batch, batch.endings[-1])

    def count(self, outcome: str) -> float:
        name = "paceline_gateway_history_rollouts_total"
        return self.registry.get_sample_value(name, {"outcome": outcome}) or 0.0

    async def stored(self, count: int) -> None:
        async with asyncio.timeout(60):
            while len(self.store.slots) < count:  # noqa: ASYNC110 (what is waited for sets no event)
                await asyncio.sleep(0.001)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE", 0.001)
    monkeypatch.setattr(module, "SOON", 0.001)


async def test_samples_are_put_in_order_and_what_gathers_meanwhile_goes_together() -> None:
    feed = Feed()
    running = asyncio.create_task(feed.history.run())
    feed.store.gate.clear()
    feed.finish(0)
    await feed.store.entered.wait()
    for slot in range(1, 6):
        feed.finish(slot)
    feed.store.gate.set()
    await feed.stored(6)
    assert feed.store.puts == [[0], [1, 2, 3, 4, 5]]
    await end([running])
    assert feed.count("stored") == 6


async def test_samples_of_a_batch_wait_for_its_last_one_to_share_their_put(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "LINGER", 3600.0)
    feed = Feed()
    running = asyncio.create_task(feed.history.run())
    batch = feed.begin(0, 1, 2)
    for index in range(3):
        for _ in range(20):
            await asyncio.sleep(0)
        assert feed.store.puts == []
        feed.end(batch, index)
    await feed.stored(3)
    await end([running])
    assert feed.store.puts == [[0, 1, 2]]


async def test_samples_do_not_wait_long_for_the_last_one_of_their_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "LINGER", 0.001)
    feed = Feed()
    running = asyncio.create_task(feed.history.run())
    feed.end(feed.begin(0, 1), 0)
    await feed.stored(1)
    await end([running])


async def test_a_put_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_PUT", 200)
    feed = Feed()
    # 80 bytes each.
    for slot in range(5):
        feed.finish(slot)
    feed.finish(5, tokens=100)
    running = asyncio.create_task(feed.history.run())
    await feed.stored(6)
    await end([running])
    assert feed.store.puts == [[0, 1], [2, 3], [4], [5]]


async def test_the_oldest_are_dropped_and_counted_when_the_store_does_not_keep_up() -> None:
    feed = Feed(most_waiting=800)
    feed.store.available = False
    for slot in range(25):
        feed.finish(slot)
    assert feed.count("dropped") == 15
    feed.store.available = True
    running = asyncio.create_task(feed.history.run())
    await feed.stored(10)
    await end([running])
    assert feed.store.slots == list(range(15, 25))


async def test_what_an_outage_cut_off_is_put_again_before_the_rest() -> None:
    feed = Feed()
    feed.store.lost = True
    running = asyncio.create_task(feed.history.run())
    for slot in range(3):
        feed.finish(slot)
    async with asyncio.timeout(60):
        while feed.store.available:  # noqa: ASYNC110 (what is waited for sets no event)
            await asyncio.sleep(0.001)
    feed.finish(3)
    feed.store.lost, feed.store.available = False, True
    await feed.stored(4)
    await end([running])
    assert feed.store.slots == [0, 1, 2, 3]
    assert feed.count("not_stored") == feed.count("dropped") == 0


async def test_what_a_store_refuses_is_not_put_again() -> None:
    feed = Feed()

    async def refuse(rollouts: Sequence[StoredRollout]) -> int:
        feed.store.puts.append([rollout.slot for rollout in rollouts])
        return 0

    feed.store.put = refuse  # type: ignore[method-assign]
    running = asyncio.create_task(feed.history.run())
    feed.finish(0)
    await feed.stored(1)
    feed.finish(1)
    await feed.stored(2)
    await end([running])
    assert feed.store.puts == [[0], [1]]
    assert feed.count("not_stored") == 2
