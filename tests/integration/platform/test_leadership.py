"""Terms of leadership on a real Redis: one leads, others stand by, and a term that is over promises nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError

from services.platform.config import ServiceConfig
from services.platform.errors import Unavailable
from services.platform.leadership import Leadership
from services.platform.store import connect
from services.platform.tasks import end

Poll = Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]]
SECONDS = 0.5


class Work:
    """A term that lasts until it is told to end, by a return or by what it is to raise."""

    def __init__(self, token: str) -> None:
        self.token = token
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ended = False

    async def run(self) -> None:
        try:
            await self.over
        finally:
            self.ended = True


class Process:
    """One that wants to lead. `terms` are all that it had, `told` what it was told of them."""

    def __init__(self, redis: Redis, namespace: str) -> None:
        self.terms: list[Work] = []
        self.told: list[tuple[bool, bool]] = []
        self.refusals: list[Exception] = []
        self.leadership = Leadership("test", redis, f"{namespace}:lease", SECONDS, self._open, self._changed)
        self.task = asyncio.create_task(self.leadership.run())

    async def _open(self, token: str) -> Work:
        if self.refusals:
            raise self.refusals.pop()
        self.terms.append(Work(token))
        return self.terms[-1]

    async def _changed(self, leading: bool) -> None:
        self.told.append((leading, self.terms[-1].ended))

    async def leads(self) -> bool:
        return self.leadership.term is not None


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    client = connect(ServiceConfig(redis_url=redis_url))
    yield client
    await client.aclose()


async def test_a_standby_leads_when_the_leader_ends(redis: Redis, namespace: str, poll: Poll) -> None:
    first = Process(redis, namespace)
    await poll(first.leads)
    second = Process(redis, namespace)
    with pytest.raises(Unavailable, match="this test stands by"):
        second.leadership.leading()
    await end([first.task])
    await poll(second.leads)
    assert second.leadership.leading() is second.terms[0]
    assert first.terms[0].ended
    assert not await first.leads()
    await end([second.task])


async def test_a_lost_lease_ends_the_term_and_the_next_has_a_token_of_its_own(
    redis: Redis, namespace: str, poll: Poll
) -> None:
    process = Process(redis, namespace)
    await poll(process.leads)
    await redis.set(f"{namespace}:lease", "another", px=200)

    async def leads_again() -> bool:
        return len(process.terms) == 2 and await process.leads()

    await poll(leads_again)
    first, second = process.terms
    assert first.token != second.token
    assert first.ended
    # Told that it is over while the work had not ended yet.
    assert process.told == [(True, False), (False, False), (True, False)]
    await end([process.task])


@pytest.mark.parametrize("refusal", [ConnectionError("away"), Unavailable("fenced")])
async def test_what_cannot_be_opened_now_is_opened_later(
    redis: Redis, namespace: str, poll: Poll, refusal: Exception
) -> None:
    process = Process(redis, namespace)
    process.refusals = [refusal]
    await poll(process.leads)
    await end([process.task])


async def test_a_fenced_term_is_followed_by_another(redis: Redis, namespace: str, poll: Poll) -> None:
    process = Process(redis, namespace)
    await poll(process.leads)
    process.terms[0].over.set_exception(Unavailable("another process leads"))

    async def leads_again() -> bool:
        return len(process.terms) == 2

    await poll(leads_again)
    await end([process.task])


async def test_a_defect_in_the_work_ends_leading_and_frees_the_lease(
    redis: Redis, namespace: str, poll: Poll
) -> None:
    process = Process(redis, namespace)
    await poll(process.leads)
    process.terms[0].over.set_exception(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        await process.task
    assert not await process.leads()
    assert await redis.get(f"{namespace}:lease") is None
