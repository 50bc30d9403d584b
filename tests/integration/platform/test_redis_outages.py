"""A Redis that answers and takes no writes stops work, not processes: registrations, leaders and watchers go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from itertools import pairwise

import pytest
from prometheus_client import REGISTRY
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from services.platform.config import LeaderConfig
from services.platform.redis.connection import Keys, Refused, connect
from services.platform.redis.decision_log import DecisionLog, DecisionRecord
from services.platform.redis.leadership import Leadership
from services.platform.redis.registry import InstanceRecord, Registration, Registry
from services.platform.tasks import end
from tests.support.redis_servers import BREAKAGES, BreakableServer

Poll = Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]]
RECORD = InstanceRecord("generation", "g0", address="127.0.0.1:1", state="serving")
TTL, BEAT, LEASE = 3.0, 0.25, 0.5
"""Seconds: a stalled machine must not let a record expire."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BreakableServer]:
    with BreakableServer(tmp_path_factory.mktemp("breakable")) as server:
        yield server


@pytest.fixture
async def store(server: BreakableServer) -> AsyncIterator[Redis]:
    client = connect(LeaderConfig(redis_url=server.url))
    yield client
    server.mend()
    await client.aclose()


@pytest.fixture(autouse=True)
def quick_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readings further apart than the heartbeats here count as an outage: the machine may have stood still."""
    monkeypatch.setattr("services.platform.redis.registry.HEARTBEAT", BEAT)


class Work:
    """A term that never ends."""

    async def run(self) -> None:
        await asyncio.get_running_loop().create_future()


class Party:
    """A registered process, a leader and a watcher, and what they were told."""

    def __init__(self, url: str, store: Redis, namespace: str) -> None:
        self.takes_heartbeats: list[bool] = []
        self.takes_lease: list[bool] = []
        self.seen: list[bool | None] = []
        self.terms: list[int] = []
        keys = Keys(namespace)
        self.registry = Registry(store, keys)
        self.registration = Registration(store, keys, RECORD, TTL, BEAT, self._told)
        config = LeaderConfig(redis_url=url, lease_seconds=LEASE)
        self.leadership = Leadership(
            "test", config, f"{namespace}:{{x}}:lease", self._open, self._changed, self._lease_told
        )
        self.tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Party:
        await self.registration.register()
        self.tasks = [
            asyncio.create_task(self.registration.run()),
            asyncio.create_task(self.leadership.run()),
            asyncio.create_task(self.registry.watch("generation", BEAT / 10, self._look)),
        ]
        return self

    async def __aexit__(self, *error: object) -> None:
        await end(self.tasks)

    async def listed(self) -> bool:
        return "g0" in await self.registry.list("generation")

    async def expired(self) -> bool:
        try:
            return not await self.listed()
        except Refused:
            # A server whose snapshot failed refuses PING, with which redis-py checks an idle connection first.
            return False

    @property
    def lost(self) -> bool:
        """True if the instance was seen, and then taken for dead."""
        return True in self.seen and False in self.seen[self.seen.index(True) :]

    async def looks_again(self, poll: Poll) -> None:
        """Wait until the watcher has told what it reads now."""
        # One look may be under way.
        before = len(self.seen)

        async def looked() -> bool:
            return len(self.seen) >= before + 2

        await poll(looked)

    async def _told(self, usable: bool) -> None:
        self.takes_heartbeats.append(usable)

    async def _lease_told(self, unfit: str) -> None:
        self.takes_lease.append(not unfit)

    async def _open(self, term: int) -> Work:
        self.terms.append(term)
        return Work()

    async def _changed(self, leading: bool) -> None:
        pass

    async def _look(self, records: dict[str, InstanceRecord] | None) -> None:
        self.seen.append(None if records is None else "g0" in records)


def metric(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"paceline_redis_{name}", labels) or 0.0


@pytest.mark.parametrize("how", BREAKAGES)
async def test_processes_outlast_a_redis_that_takes_no_writes(
    server: BreakableServer, store: Redis, namespace: str, poll: Poll, how: str
) -> None:
    before, left = metric("errors_total", reason=how), [TTL * 1000]
    async with Party(server.url, store, namespace) as party:

        async def leads() -> bool:
            return party.leadership.term is not None and True in party.seen

        async def told() -> bool:
            return party.takes_heartbeats == [False] and party.takes_lease == [False]

        async def kept() -> bool:
            left.append(await store.pttl(Keys(namespace).registry("generation", "g0")))
            return sum(after > before for before, after in pairwise(left)) > 3

        async def back() -> bool:
            return (party.takes_heartbeats, party.takes_lease) == ([False, True], [False, True])

        await poll(leads)
        server.break_(how)
        await poll(told)
        assert metric("up") == 0
        assert metric("errors_total", reason=how) > before
        if how == "full":
            # Nothing that is there has to go because nothing can be added.
            await poll(kept)
            assert await party.listed()
        else:
            await poll(party.expired)
            await party.looks_again(poll)
        server.mend()
        await poll(back)
        await poll(party.listed)
        await party.looks_again(poll)
        assert not party.lost
        assert len(party.terms) == 1
        assert not any(task.done() for task in party.tasks)
        assert metric("up") == 1


async def test_registering_waits_for_a_redis_that_takes_writes(
    server: BreakableServer, store: Redis, namespace: str, poll: Poll
) -> None:
    server.break_("read_only")
    registration = Registration(store, Keys(namespace), RECORD)
    registering = asyncio.create_task(registration.register())

    async def waits() -> bool:
        return metric("up") == 0 or registering.done()

    await poll(waits)
    assert not registering.done()
    server.mend()
    assert await asyncio.wait_for(registering, 60) == 1


async def test_an_instance_that_died_in_the_outage_is_gone_after_it(
    server: BreakableServer, store: Redis, namespace: str, poll: Poll, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.platform.redis.registry.SETTLING", 0.2)
    async with AsyncExitStack() as stack:
        party = await stack.enter_async_context(Party(server.url, store, namespace))

        async def seen() -> bool:
            return True in party.seen

        async def gone() -> bool:
            return party.seen[-1] is False

        await poll(seen)
        server.break_("read_only")
        await end(party.tasks[:1])
        await poll(party.expired)
        await party.looks_again(poll)
        assert not party.lost
        server.mend()
        await poll(gone)


async def test_a_redis_that_has_lost_everything_has_lost_no_instance(
    server: BreakableServer, store: Redis, namespace: str, poll: Poll
) -> None:
    async with Party(server.url, store, namespace) as party:

        async def seen() -> bool:
            return True in party.seen

        await poll(seen)
        # No heartbeat comes while the watcher looks.
        await end(party.tasks[:1])
        await store.flushall()
        await party.looks_again(poll)
        party.tasks[0] = asyncio.create_task(party.registration.run())
        await poll(party.listed)
        await party.looks_again(poll)
        assert not party.lost


async def test_a_mistake_in_a_command_is_no_outage(
    server: BreakableServer, store: Redis, namespace: str
) -> None:
    registration = Registration(store, Keys(namespace), RECORD)
    await registration.register()
    epoch = Keys(namespace).epoch("generation", "g0")
    await store.delete(epoch)
    await store.rpush(epoch, "no number")  # type: ignore[misc]
    with pytest.raises(ResponseError, match="WRONGTYPE") as raised:
        await asyncio.wait_for(registration.run(), 60)
    assert not isinstance(raised.value, Refused)


async def test_a_pipeline_says_of_each_command_whether_redis_refused_it(
    server: BreakableServer, store: Redis, namespace: str
) -> None:
    server.break_("full")
    pipe = store.pipeline(transaction=False)
    pipe.get(namespace).set(namespace, 1).eval("return redis.call('SET', KEYS[1], 1)", 1, namespace)
    pipe.eval("return redis.call('NOTHING')", 0)
    read, written, scripted, wrong = await pipe.execute(raise_on_error=False)
    assert read is None
    assert [type(written), type(scripted), type(wrong)] == [Refused, Refused, ResponseError]
    with pytest.raises(Refused, match="OOM"):
        async with store.pipeline(transaction=True) as pipe:
            await pipe.set(namespace, 1).execute()


async def test_a_decision_that_is_refused_costs_its_writer_nothing(
    server: BreakableServer, store: Redis, namespace: str
) -> None:
    decisions = DecisionLog(store, namespace)
    server.break_("full")
    assert not await decisions.write(DecisionRecord("knobs", "a reason"))
    server.mend()
    assert await decisions.write(DecisionRecord("knobs", "a reason"))
