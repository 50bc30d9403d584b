"""Sentinel and Cluster: what the services keep in Redis works there, and follows a failover."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from services.contracts.errors import Unavailable
from services.contracts.fenced import FencedScripts
from services.contracts.knob_store import KnobStore
from services.contracts.knobs import KnobScope
from services.platform.config import LeaderConfig, ServiceConfig
from services.platform.redis.connection import OUTAGES, Keys, connect
from services.platform.redis.decision_log import DecisionLog, DecisionRecord
from services.platform.redis.leadership import Lease
from services.platform.redis.registry import InstanceRecord, Registration, Registry
from services.platform.tasks import end
from tests.support.redis_servers import RedisServer, fail_over, form_cluster, sentinel_of, until

Poll = Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]]
RECORD = InstanceRecord("generation", "g0", address="127.0.0.1:1", state="serving")
NODES = 3


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RedisServer]]:
    folder = tmp_path_factory.mktemp("cluster")
    nodes = [RedisServer.of_cluster(folder / str(number)) for number in range(NODES)]
    try:
        for node in nodes:
            node.start()
        form_cluster(nodes)
        yield nodes
    finally:
        for node in nodes:
            node.kill()


@pytest.fixture
async def cluster(nodes: list[RedisServer]) -> AsyncIterator[Redis]:
    hosts = ",".join(f"127.0.0.1:{node.port}" for node in nodes)
    async with connect(ServiceConfig(redis_url=f"redis+cluster://{hosts}")) as client:
        yield client


async def test_a_cluster_keeps_registrations_leases_knobs_and_decisions(cluster: Redis) -> None:
    # Enough namespaces that each node has some of the keys.
    for number in range(2 * NODES):
        keys = Keys(f"ns{number}")
        registrations = [
            Registration(cluster, keys, InstanceRecord("generation", f"g{i}"), ttl=60.0) for i in range(3)
        ]
        for registration in registrations:
            assert await registration.register() == 1
        registry = Registry(cluster, keys)
        assert (await registry.list("generation")).keys() == {"g0", "g1", "g2"}
        await registrations[0].deregister()
        assert (await registry.list("generation")).keys() == {"g1", "g2"}

        name = f"ns{number}:{{policy}}:lease"
        lease = Lease(cluster, name, 60.0)
        term = await lease.acquire()
        assert (
            await KnobStore(cluster, f"ns{number}", term).set(KnobScope(), 0, {"speculation": False}, "x")
            == 1
        )
        with pytest.raises(Unavailable):
            await FencedScripts(cluster, name, term - 1, "test").run("return 1", ())
        assert (await KnobStore(cluster, f"ns{number}").load()).revision == 1
        await lease.release()

        decisions = DecisionLog(cluster, f"ns{number}")
        assert await decisions.write(DecisionRecord("knobs", "a reason"))
        assert [each.reason async for each in _first(decisions)] == ["a reason"]


async def _first(decisions: DecisionLog) -> AsyncIterator[DecisionRecord]:
    async for each in decisions.follow(after="0"):
        yield each
        return


async def test_a_pipeline_may_span_the_nodes_of_a_cluster(cluster: Redis) -> None:
    names = [f"key{number}" for number in range(4 * NODES)]
    pipe = cluster.pipeline(transaction=False)
    for name in names:
        pipe.set(name, name)
    assert await pipe.execute() == [True] * len(names)
    pipe = cluster.pipeline(transaction=False)
    for name in names:
        pipe.eval("return redis.call('GET', KEYS[1])", 1, name)
    assert await pipe.execute(raise_on_error=False) == [name.encode() for name in names]


async def test_a_cluster_that_is_away_is_an_outage() -> None:
    client = connect(ServiceConfig(redis_url="redis+cluster://127.0.0.1:1"))
    with pytest.raises(OUTAGES):
        await client.get("key")
    with pytest.raises(OUTAGES):
        await client.pipeline(transaction=False).get("key").execute()
    await client.aclose()


async def test_clients_follow_the_primary_that_a_sentinel_promotes(tmp_path: Path, poll: Poll) -> None:
    primary = RedisServer(tmp_path / "primary")
    replica = RedisServer(tmp_path / "replica", replicaof=f"127.0.0.1 {primary.port}")
    sentinel = sentinel_of(tmp_path / "sentinel", primary, "main")
    config = LeaderConfig(redis_url=f"redis+sentinel://127.0.0.1:{sentinel.port}/main", lease_seconds=600.0)
    store, keys = connect(config), Keys("ns")
    registration = Registration(store, keys, RECORD, ttl=60.0, interval=0.1)
    lease = Lease(store, "ns:{x}:lease", config.lease_seconds)
    tasks = []
    try:
        with primary, replica, sentinel:
            until(lambda: replica.client.info("replication")["master_link_status"] == "up", "it replicates")
            until(lambda: sentinel.client.sentinel_slaves("main"), "the sentinel knows the replica")
            await registration.register()
            tasks = [asyncio.create_task(registration.run())]
            term = await lease.acquire()
            until(lambda: replica.client.exists("ns:{x}:lease"), "the lease is replicated")
            fail_over(primary, sentinel, "main")

            async def written() -> bool:
                await registration.update(policy_version=7)
                raw = replica.client.get(keys.registry("generation", "g0"))
                return b'"policy_version":7' in raw

            await poll(written)
            assert (await Registry(store, keys).list("generation"))["g0"].epoch == 1
            assert await store.get("ns:{x}:lease") == str(term).encode()
            assert not tasks[0].done()
    finally:
        await end(tasks)
        await store.aclose()
