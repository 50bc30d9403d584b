"""Long samples in the journal: their tokens are written once, and none is ever missing, wrong or doubled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from services.gateway.config import GatewayConfig
from services.gateway.journal.record import has_more
from services.gateway.state.sample import SamplePhase
from services.platform.redis.connection import connect
from services.platform.redis.embedded import EmbeddedRedis
from tests.support.journal_driver import KEY, JournalDriver

R = TypeVar("R")


class JournalMachine(RuleBasedStateMachine):
    """A gateway and its trainer, with a Redis that may forget and connections that may break, in any order."""

    url: str
    loop: asyncio.AbstractEventLoop

    def run(self, work: Awaitable[R]) -> R:
        return self.loop.run_until_complete(work)  # type: ignore[arg-type]

    @initialize(
        lengths=st.lists(st.integers(1, 30), min_size=2, max_size=4),
        most_bytes=st.sampled_from([0, 300, 1 << 20]),
        least_tokens=st.sampled_from([1, 4]),
        opened=st.booleans(),
    )
    def begin(self, lengths: list[int], most_bytes: int, least_tokens: int, opened: bool) -> None:
        self.redis: Any = connect(GatewayConfig(redis_url=self.url))
        self.run(self.redis.flushall())
        self.driver = JournalDriver(self.redis, "ns", lengths, most_bytes, least_tokens, opened=opened)
        self.run(self.driver.create())
        self.snapshots = [self.dump()]

    def dump(self) -> dict[str, bytes]:
        names = self.driver.names.all
        return {name: kept for name in names if (kept := self.run(self.redis.dump(name))) is not None}

    @rule(which=st.integers(0, 3), count=st.integers(1, 12))
    def grow(self, which: int, count: int) -> None:
        self.driver.grow(which % len(self.driver.batch.samples), count)

    @rule(which=st.integers(0, 3), count=st.integers(1, 12))
    def advance(self, which: int, count: int) -> None:
        """Grow and write: what happens most."""
        self.grow(which, count)
        self.write(answered=True)

    @rule(length=st.integers(1, 30), answered=st.booleans())
    def add(self, length: int, answered: bool) -> None:
        if len(self.driver.lengths) < 8:
            self.run(self.driver.add(length, answered=answered))
            self.snapshots.append(self.dump())

    @rule()
    def close(self) -> None:
        self.run(self.driver.close())
        self.snapshots.append(self.dump())

    @rule(which=st.integers(0, 3))
    def lose_the_instance(self, which: int) -> None:
        sample = self.driver.batch.samples[which % len(self.driver.batch.samples)]
        self.driver.batch.lost(sample.index, sample.attempt, 2.0)

    @rule(answered=st.booleans())
    def write(self, answered: bool) -> None:
        self.run(self.driver.write(answered=answered))
        self.snapshots.append(self.dump())

    @rule(back=st.integers(1, 6))
    def forget_the_last_writes(self, back: int) -> None:
        del self.snapshots[max(1, len(self.snapshots) - back) :]
        self.run(self.redis.flushall())
        for name, kept in self.snapshots[-1].items():
            self.run(self.redis.restore(name, 0, kept))

    @rule(what=st.sampled_from(["meta", "events", "done", "chunks", "adds", "all"]))
    def forget_keys(self, what: str) -> None:
        names = getattr(self.driver.names, what)
        self.run(self.redis.delete(*([names] if isinstance(names, str) else names)))
        self.snapshots.append(self.dump())

    @rule()
    def restart(self) -> None:
        self.run(self.driver.restart())
        self.snapshots.append(self.dump())

    @rule(count=st.integers(1, 4))
    def deliver(self, count: int) -> None:
        self.run(self.driver.deliver(count))

    @rule()
    def acknowledge(self) -> None:
        self.run(self.driver.acknowledge())
        self.snapshots.append(self.dump())

    @invariant()
    def a_sample_runs_or_has_ended(self) -> None:
        if hasattr(self, "driver"):
            batch, record = self.driver.batch, self.driver.record
            waiting = {ending.index for ending in batch.endings}
            over = {s.index for s in batch.samples if s.phase is SamplePhase.ENDED}
            assert over == waiting | set(record.ended())
            assert batch.ended_tokens == sum(batch.samples[index].entries for index in waiting)
            assert record.unwritten_bytes == sum(map(len, record.unwritten.values()))

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.run(self.driver.end())
            self.run(self.redis.aclose())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    """A server of our own, which may be emptied."""
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as server:
        yield server


def test_whatever_redis_forgets_every_sample_is_delivered_with_its_own_tokens(server: EmbeddedRedis) -> None:
    JournalMachine.url = server.url
    with asyncio.Runner() as runner:
        JournalMachine.loop = runner.get_loop()
        limits = settings(max_examples=150, stateful_step_count=30, deadline=None)
        run_state_machine_as_test(JournalMachine, settings=limits)


@pytest.fixture
async def driver(server: EmbeddedRedis, namespace: str) -> AsyncIterator[JournalDriver]:
    """A gateway that keeps no result in memory."""
    redis: Any = connect(GatewayConfig(redis_url=server.url))
    driver = JournalDriver(redis, namespace, [30, 30], most_bytes=0, least_tokens=1)
    await driver.create()
    yield driver
    await redis.aclose()


async def _lose_second_chunk(driver: JournalDriver) -> None:
    """Write two chunks of the first sample, and bring back the state before the second."""
    driver.grow(0, 5)
    await driver.write()
    before = await driver.redis.dump(driver.names.chunks)
    driver.grow(0, 5)
    await driver.write()
    assert driver.batch.samples[0].chunks == 2
    await driver.redis.restore(driver.names.chunks, 0, before, replace=True)


async def test_a_chunk_that_does_not_follow_what_is_there_is_refused(driver: JournalDriver) -> None:
    await _lose_second_chunk(driver)
    driver.grow(0, 5)
    await driver.write()
    assert driver.batch.samples[0].chunks == 0
    assert not await driver.redis.exists(driver.names.chunks)
    await driver.write()
    assert await driver.redis.hget(driver.names.chunks, 0) == b"1:14"
    await driver.end()


async def test_an_end_that_does_not_follow_what_is_there_is_refused_and_written_whole(
    driver: JournalDriver,
) -> None:
    await _lose_second_chunk(driver)
    driver.grow(0, 30)
    await driver.write()
    assert (driver.record.safe, await driver.redis.exists(driver.names.done)) == (0, 0)
    await driver.write()
    assert driver.record.safe == 1
    assert (await driver.redis.hget(driver.names.done, 0)).endswith(b":0:0")
    await driver.deliver(1)
    assert driver.delivered == {0}


@pytest.mark.parametrize("fields", [(), ("0:0",), ("0",)])
async def test_an_ended_sample_is_read_with_all_its_chunks_or_not_at_all(
    driver: JournalDriver, fields: tuple[str, ...]
) -> None:
    driver.grow(0, 5)
    await driver.write()
    driver.grow(0, 30)
    await driver.write()
    assert (await driver.journal.events(KEY, [0]))[0]
    if fields:
        await driver.redis.hdel(driver.names.chunks, *fields)
    else:
        await driver.redis.delete(driver.names.chunks)
    assert await driver.journal.events(KEY, [0]) == [None]


async def test_a_long_sample_is_written_once(server: EmbeddedRedis) -> None:
    redis: Any = connect(GatewayConfig(redis_url=f"{server.url}?client_name=measured"))
    observer: Any = connect(GatewayConfig(redis_url=server.url))
    try:
        lengths = [32_768, 20_000, 5_000, 1_000, 10]
        driver = JournalDriver(redis, "once", lengths, most_bytes=0, least_tokens=1024)
        await driver.create()
        before = await _received(observer)
        while driver.batch.unfinished or has_more(driver.batch, driver.record):
            for index in range(len(lengths)):
                driver.grow(index, 512)
            await driver.write()
        written = await _received(observer) - before
        payloads = await driver.journal.events(KEY, range(len(lengths)))
        results = sum(map(len, payloads))
        assert results > 6 * sum(lengths)
        assert written < 1.05 * results
        # Nothing is in memory: what is delivered comes from the chunks.
        await driver.deliver(len(lengths))
        assert driver.delivered == set(range(len(lengths)))
        # What is acknowledged leaves Redis, chunks and all.
        driver.cursor = driver.record.cursor_of(driver.record.after(0, 3)[-1][1])
        await driver.acknowledge()
        acknowledged = {str(index).encode() for _, index in driver.record.after(0, 3)}
        left = {name.split(b":")[0] for name in await observer.hkeys(driver.names.chunks)}
        assert left == {b"0", b"1", b"2"} - acknowledged
        driver.cursor = driver.record.written
        await driver.acknowledge()
        assert not await observer.exists(driver.names.chunks, driver.names.events)
    finally:
        await redis.aclose()
        await observer.aclose()


async def _received(observer: Any) -> int:
    """Return the bytes that the server has received from the client that is measured."""
    return sum(int(each["tot-net-in"]) for each in await observer.client_list() if each["name"] == "measured")


async def test_chunks_that_were_read_back_go_on_after_a_restart(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as server:
        redis: Any = connect(GatewayConfig(redis_url=server.url))
        try:
            driver = JournalDriver(redis, "ns", [9_000, 50], most_bytes=1 << 20, least_tokens=1024)
            await driver.create()
            for _ in range(8):
                driver.grow(0, 600)
                await driver.write()
            await asyncio.to_thread(server.stop)
            server.start()
            await driver.restart()
            sample = driver.batch.samples[0]
            assert (len(sample.tokens), sample.journaled, sample.chunks) == (4_799, 4_799, 4)
            await driver.end()
            assert await redis.hget(driver.names.done, 0)
        finally:
            await redis.aclose()
