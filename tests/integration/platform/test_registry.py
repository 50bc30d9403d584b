"""Registration, expiry and epochs on a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError

from services.contracts.errors import FailedPrecondition
from services.platform.config import ServiceConfig
from services.platform.redis.connection import Keys, connect
from services.platform.redis.embedded import EmbeddedRedis
from services.platform.redis.registry import InstanceRecord, Registration, Registry
from services.platform.tasks import end

RECORD = InstanceRecord("generation", "g0", address="127.0.0.1:1", state="stale", vocab_size=100)


@pytest.fixture
async def store(redis_url: str) -> AsyncIterator[Redis]:
    client = connect(ServiceConfig(redis_url=redis_url))
    yield client
    await client.aclose()


@pytest.fixture
def keys(namespace: str) -> Keys:
    return Keys(namespace)


@asynccontextmanager
async def beating(registration: Registration) -> AsyncIterator[asyncio.Task[None]]:
    """Run the heartbeat of a registration."""
    task = asyncio.create_task(registration.run())
    try:
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, FailedPrecondition):
            await task


async def test_a_registered_instance_is_listed_as_it_is(store: Redis, keys: Keys) -> None:
    registration = Registration(store, keys, RECORD)
    assert await registration.register() == 1
    registry = Registry(store, keys)
    listed = await registry.list("generation")
    assert listed == {"g0": registration.record}
    assert listed["g0"].registered_at > 0
    assert await registry.list("gateway") == {}
    await registration.update(state="serving", policy_version=7, load={"running": 2})
    record = (await registry.list("generation"))["g0"]
    assert (record.state, record.policy_version, record.load) == ("serving", 7, {"running": 2})
    assert record.vocab_size == 100


async def test_namespaces_do_not_see_each_other(store: Redis, keys: Keys) -> None:
    await Registration(store, keys, RECORD).register()
    assert await Registry(store, Keys(f"{keys.namespace}-other")).list("generation") == {}


async def test_a_record_goes_when_its_heartbeat_stops(store: Redis, keys: Keys, poll: Any) -> None:
    registry = Registry(store, keys)
    lasting = Registration(store, keys, RECORD, ttl=0.5, interval=0.1)
    other = InstanceRecord("generation", "g1")
    ending = Registration(store, keys, other, ttl=0.5, interval=0.1)
    await lasting.register()
    await ending.register()
    async with beating(lasting):

        async def are_listed(*names: str) -> bool:
            return (await registry.list("generation")).keys() == set(names)

        async with beating(ending):
            await poll(lambda: are_listed("g0", "g1"))
        await poll(lambda: are_listed("g0"))


async def test_deregistering_removes_the_record_at_once(store: Redis, keys: Keys) -> None:
    registration = Registration(store, keys, RECORD, interval=0.01)
    await registration.register()
    async with beating(registration) as task:
        await registration.deregister()
        await asyncio.wait_for(task, 60)
    await registration.update(state="serving")
    assert await Registry(store, keys).list("generation") == {}
    assert await store.zcard(keys.registry_index("generation")) == 0


class DeafStore:
    """Answers a cancelled command as if nothing had happened, as redis-py does now and then."""

    async def incr(self, key: str) -> int:
        return 1

    async def eval(self, *arguments: object) -> int:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0.01)
        return 1


async def test_a_cancellation_that_the_client_swallows_still_ends_the_heartbeat(keys: Keys) -> None:
    registration = Registration(DeafStore(), keys, RECORD, interval=0)  # type: ignore[arg-type]
    await registration.register()
    for turns in range(10):
        task = asyncio.create_task(registration.run())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=60)
        assert done, f"went on after a cancellation at turn {turns}"
        assert task.cancelled()


async def test_the_epoch_grows_with_every_registration(store: Redis, keys: Keys) -> None:
    first = Registration(store, keys, RECORD)
    assert await first.register() == 1
    await first.deregister()
    assert await Registration(store, keys, RECORD).register() == 2
    assert await Registration(store, keys, RECORD).register() == 3
    other = Registration(store, keys, InstanceRecord("generation", "g1"))
    assert await other.register() == 1


async def test_an_older_process_gives_way_to_a_younger_one(store: Redis, keys: Keys) -> None:
    old = Registration(store, keys, RECORD, interval=0.01)
    await old.register()
    async with beating(old) as task:
        young = Registration(store, keys, RECORD, ttl=60.0)
        await young.register()
        with pytest.raises(FailedPrecondition, match="another process") as caught:
            await asyncio.wait_for(task, 60)
    assert caught.value.reason == "SUPERSEDED"
    await old.deregister()
    listed = await Registry(store, keys).list("generation")
    assert listed["g0"].epoch == 2


async def test_one_unreadable_record_does_not_hide_the_rest(store: Redis, keys: Keys) -> None:
    await Registration(store, keys, RECORD).register()
    await store.zadd(keys.registry_index("generation"), {"broken": 1e12})
    await store.set(keys.registry("generation", "broken"), b"\xff{")
    assert (await Registry(store, keys).list("generation")).keys() == {"g0"}


async def test_registration_survives_a_restart_of_redis(tmp_path: Path, keys: Keys, poll: Any) -> None:
    server = EmbeddedRedis(tmp_path)
    store = connect(ServiceConfig(redis_url=server.start()))
    registry = Registry(store, keys)
    registration = Registration(store, keys, RECORD, ttl=0.5, interval=0.1)
    await registration.register()
    async with beating(registration) as task:
        server.kill()
        with pytest.raises(ConnectionError):
            await registry.list("generation")
        await registration.update(state="serving")
        assert not task.done()
        server.start()

        async def back() -> bool:
            listed = await registry.list("generation")
            return "g0" in listed and listed["g0"].state == "serving"

        await poll(back)
        assert registration.record.epoch == 1
    await store.aclose()
    server.stop()


async def test_an_epoch_lives_on_when_redis_loses_its_data(store: Redis, keys: Keys, poll: Any) -> None:
    registration = Registration(store, keys, RECORD, interval=0.05)
    for _ in range(3):
        await registration.register()
    async with beating(registration):
        await store.delete(keys.epoch("generation", "g0"), keys.registry("generation", "g0"))

        async def back() -> bool:
            return "g0" in await Registry(store, keys).list("generation")

        await poll(back)
    assert await Registration(store, keys, RECORD).register() == 4


async def test_a_watch_tells_what_is_there_and_of_an_outage(tmp_path: Path, keys: Keys, poll: Any) -> None:
    server = EmbeddedRedis(tmp_path)
    store = connect(ServiceConfig(redis_url=server.start()))
    registration = Registration(store, keys, RECORD, ttl=60.0, interval=0.1)
    await registration.register()
    told: list[dict[str, InstanceRecord] | None] = []

    async def tell(records: dict[str, InstanceRecord] | None) -> None:
        told.append(records)

    watching = asyncio.create_task(Registry(store, keys).watch("generation", 0.01, tell))

    async def told_of_it() -> bool:
        return bool(told) and told[-1] is not None and "g0" in told[-1]

    async def told_of_the_outage() -> bool:
        return told[-1] is None

    # Redis may have lost the record when it is back; the heartbeat brings it again.
    async with beating(registration):
        await poll(told_of_it)
        server.kill()
        await poll(told_of_the_outage)
        server.start()
        await poll(told_of_it)
    await end([watching])
    assert watching.cancelled()
    await store.aclose()
    server.stop()
