"""Terms of leadership on a real Redis: one leads, others stand by, and a term that is over promises nothing."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import pairwise

import pytest
from redis import Redis as BlockingRedis
from redis.asyncio import Redis
from redis.exceptions import ConnectionError, ResponseError

from services.contracts.errors import Unavailable
from services.platform.config import LeaderConfig
from services.platform.redis.connection import connect
from services.platform.redis.leadership import Leader, Leadership, Lease
from services.platform.tasks import end
from tests.support.waiting import until

Poll = Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]]
SECONDS = 0.5


def lease_of(namespace: str) -> str:
    return f"{namespace}:{{test}}:lease"


class Work:
    """A term that lasts until it is told to end, by a return or by what it is to raise."""

    def __init__(self, term: int) -> None:
        self.number = term
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ended = False

    async def run(self) -> None:
        try:
            await self.over
        finally:
            self.ended = True


class Process:
    """One that wants to lead. `terms` are all that it had, `told` what it was told of them."""

    def __init__(self, config: LeaderConfig, namespace: str) -> None:
        self.terms: list[Work] = []
        self.told: list[tuple[bool, bool]] = []
        self.refusals: list[Exception] = []
        self.unfit: list[str] = []
        """Why it could not lead, as it was told."""
        self.leadership = Leadership(
            "test", config, lease_of(namespace), self._open, self._changed, unfit=self._unfit
        )
        self.task = asyncio.create_task(self.leadership.run())

    async def _open(self, term: int) -> Work:
        if self.refusals:
            raise self.refusals.pop()
        self.terms.append(Work(term))
        return self.terms[-1]

    async def _changed(self, leading: bool) -> None:
        self.told.append((leading, self.terms[-1].ended))

    async def _unfit(self, why: str) -> None:
        self.unfit.append(why)

    async def leads(self) -> bool:
        return self.leadership.term is not None


@pytest.fixture
def config(redis_url: str) -> LeaderConfig:
    return LeaderConfig(redis_url=redis_url, lease_seconds=SECONDS)


@pytest.fixture
async def redis(config: LeaderConfig) -> AsyncIterator[Redis]:
    client = connect(config)
    yield client
    await client.aclose()


async def test_a_standby_leads_when_the_leader_ends(config: LeaderConfig, namespace: str, poll: Poll) -> None:
    first = Process(config, namespace)
    await poll(first.leads)
    second = Process(config, namespace)
    with pytest.raises(Unavailable, match="this test stands by"):
        second.leadership.leading()
    await end([first.task])
    await poll(second.leads)
    assert second.leadership.leading() is second.terms[0]
    assert first.terms[0].ended
    assert not await first.leads()
    await end([second.task])


async def test_a_lost_lease_ends_the_term_and_the_next_is_higher(
    config: LeaderConfig, redis: Redis, namespace: str, poll: Poll
) -> None:
    process = Process(config, namespace)
    await poll(process.leads)
    await redis.set(lease_of(namespace), "another")

    async def stands_by() -> bool:
        return not await process.leads()

    async def leads_again() -> bool:
        return len(process.terms) == 2 and await process.leads()

    await poll(stands_by)
    await redis.delete(lease_of(namespace))
    await poll(leads_again)
    first, second = process.terms
    assert first.number < second.number
    assert first.ended
    # Told that it is over while the work had not ended yet.
    assert process.told == [(True, False), (False, False), (True, False)]
    await end([process.task])


@pytest.mark.parametrize("refusal", [ConnectionError("away"), Unavailable("fenced")])
async def test_what_cannot_be_opened_now_is_opened_later(
    config: LeaderConfig, namespace: str, poll: Poll, refusal: Exception
) -> None:
    process = Process(config, namespace)
    process.refusals = [refusal]
    await poll(process.leads)
    first, last = process.unfit
    assert first in ("Redis cannot be used: unreachable", "fenced")
    assert last == ""
    await end([process.task])


async def test_a_lease_whose_term_cannot_be_opened_is_free_for_others(
    config: LeaderConfig, namespace: str, poll: Poll
) -> None:
    first = Process(config, namespace)
    first.refusals = [ResponseError("WRONGTYPE") for _ in range(1000)]

    async def refused() -> bool:
        return len(first.refusals) < 1000

    await poll(refused)
    second = Process(config, namespace)
    await poll(second.leads)
    refusals = len(first.refusals)
    with pytest.raises(Unavailable, match="this test cannot lead: what the leader needs in Redis"):
        first.leadership.leading()

    async def follows() -> bool:
        return first.leadership.unfit == ""

    # Nothing is held against it for ever: the other one leads, and what can be checked is fine.
    await poll(follows)
    assert (len(first.refusals), first.terms) == (refusals, [])
    await end([first.task, second.task])


async def test_a_fenced_term_is_followed_by_another(config: LeaderConfig, namespace: str, poll: Poll) -> None:
    process = Process(config, namespace)
    await poll(process.leads)
    process.terms[0].over.set_exception(Unavailable("another process leads"))

    async def leads_again() -> bool:
        return len(process.terms) == 2

    await poll(leads_again)
    await end([process.task])


async def test_a_defect_in_the_work_ends_leading_and_frees_the_lease(
    config: LeaderConfig, redis: Redis, namespace: str, poll: Poll
) -> None:
    process = Process(config, namespace)
    await poll(process.leads)
    process.terms[0].over.set_exception(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        await process.task
    assert not await process.leads()
    assert await redis.get(lease_of(namespace)) is None


async def test_terms_ascend_though_redis_forgets_them(redis: Redis, namespace: str) -> None:
    names = (lease_of(namespace), f"{lease_of(namespace)}:term")
    first, second = (Lease(redis, names[0], SECONDS) for _ in range(2))
    terms, began = [], int(time.time())
    for lease in (first, second, first, second):
        terms.append(await lease.acquire())
        await lease.release()
    # Four terms within a second are ahead of the clock: what the process itself has seen counts too.
    await redis.delete(*names)
    terms.append(await second.acquire())
    assert terms == sorted(set(terms))
    assert terms[0] >= began


async def test_who_stands_by_knows_the_term_and_the_address_of_who_leads(
    redis: Redis, namespace: str
) -> None:
    key = lease_of(namespace)
    first, silent = Lease(redis, key, 60.0, address=lambda: "10.0.0.1:7400"), Lease(redis, key, 60.0)
    standby = Lease(redis, key, SECONDS)
    term = await first.acquire()
    assert first.leader is None
    waiting = asyncio.create_task(standby.acquire())
    await until(lambda: standby.leader == Leader(term, "10.0.0.1:7400"), "it is known")
    # It ends with the lease, so that nobody is sent to who led before.
    await first.release()
    assert not await redis.exists(f"{key}:address")
    assert await waiting > term
    assert standby.leader is None
    await standby.release()
    # As of a version that gave no address.
    term = await silent.acquire()
    waiting = asyncio.create_task(standby.acquire())
    await until(lambda: standby.leader == Leader(term, ""), "it is known")
    await end([waiting])


async def test_a_leader_keeps_its_term_where_redis_lost_it(
    config: LeaderConfig, redis: Redis, namespace: str, poll: Poll
) -> None:
    process = Process(config, namespace)
    await poll(process.leads)
    await redis.delete(lease_of(namespace), f"{lease_of(namespace)}:term")

    async def again() -> bool:
        return await redis.get(lease_of(namespace)) is not None

    await poll(again)
    number = str(process.terms[0].number).encode()
    assert await redis.mget(lease_of(namespace), f"{lease_of(namespace)}:term") == [number, number]
    assert len(process.terms) == 1
    await end([process.task])


async def test_an_expired_lease_is_not_taken_back_after_a_later_term(
    config: LeaderConfig, redis: Redis, namespace: str, poll: Poll
) -> None:
    process = Process(config, namespace)
    await poll(process.leads)
    async with redis.pipeline() as pipe:
        pipe.delete(lease_of(namespace)).set(f"{lease_of(namespace)}:term", process.terms[0].number + 1)
        await pipe.execute()

    async def follows() -> bool:
        return len(process.terms) == 2

    await poll(follows)
    assert process.terms[1].number > process.terms[0].number + 1
    await end([process.task])


def blocked_until(holds: Callable[[], bool]) -> None:
    """Keep the event loop from turning until the condition holds."""
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


async def test_a_blocked_event_loop_does_not_lose_the_lease(
    config: LeaderConfig, redis_url: str, namespace: str, poll: Poll
) -> None:
    process = Process(config, namespace)
    await poll(process.leads)
    with BlockingRedis.from_url(redis_url) as redis:
        term, left = str(process.terms[0].number).encode(), [0]

        def renewed_often() -> bool:
            holder, milliseconds = (
                redis.pipeline().get(lease_of(namespace)).pttl(lease_of(namespace)).execute()
            )
            assert holder in (term, None)
            left.append(milliseconds)
            return sum(after > before for before, after in pairwise(left)) > 8

        blocked_until(renewed_often)
    assert len(process.terms) == 1
    await end([process.task])


async def test_a_loop_that_is_blocked_for_long_lets_its_lease_go_and_goes_on_after_it(
    redis: Redis, redis_url: str, namespace: str, poll: Poll
) -> None:
    config = LeaderConfig(redis_url=redis_url, lease_seconds=SECONDS, stall_seconds=0.3)
    process = Process(config, namespace)
    await poll(process.leads)
    with BlockingRedis.from_url(redis_url) as blocking:
        blocked_until(lambda: blocking.get(lease_of(namespace)) is None)

    async def held() -> bool:
        return await redis.get(lease_of(namespace)) is not None

    await poll(held)
    assert len(process.terms) == 1
    await end([process.task])


async def test_nothing_of_a_leadership_is_left_when_it_ends(
    config: LeaderConfig, namespace: str, poll: Poll
) -> None:
    before = threads()
    process = Process(config, namespace)
    await poll(process.leads)
    assert len(threads() - before) == 1
    await end([process.task])
    assert threads() == before


def threads() -> set[threading.Thread]:
    """Return the threads that keep a lease; others come and go."""
    return {thread for thread in threading.enumerate() if thread.name == "lease"}
