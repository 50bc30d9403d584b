"""A gateway that could not lead says so, and lets another one lead."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from http.client import HTTPConnection
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.v1 import rollout_pb2
from services.contracts.gateway_keys import GatewayKeys
from services.gateway.config import GatewayConfig
from services.gateway.term import LeadershipTerm
from services.platform.grpc.server import LEADER, STORE
from services.platform.redis.connection import connect
from tests.integration.gateway.conftest import CALL, Cluster, RunningGateway, details, until

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
LEASE = 2.0
"""Seconds of a lease that its holder keeps on a busy machine, and that a test can wait for."""


class Account:
    """A user of the Redis of the tests, for one gateway."""

    def __init__(self, cluster: Cluster) -> None:
        self._redis: Any = connect(GatewayConfig(redis_url=cluster.redis_url))
        self._name = f"{cluster.namespace}-user"
        self.url = cluster.redis_url.replace("unix://", f"unix://{self._name}:secret@")

    async def allow(self, *rules: str) -> None:
        """Set its rights."""
        await self._redis.execute_command("ACL", "SETUSER", self._name, "on", ">secret", "~*", "&*", *rules)

    async def remove(self) -> None:
        """Close its connections, and refuse new ones."""
        await self._redis.execute_command("ACL", "DELUSER", self._name)

    async def close(self) -> None:
        await self.remove()
        await self._redis.aclose()


@pytest.fixture
async def account(cluster: Cluster) -> AsyncIterator[Account]:
    account = Account(cluster)
    await account.allow("+@all")
    yield account
    # Its gateway ends with the right to release its lease.
    await cluster.close()
    await account.close()


def ready(gateway: RunningGateway) -> tuple[int, str]:
    """Ask as a kubelet does; return the status and the reason."""
    connection = HTTPConnection("127.0.0.1", gateway.gateway.server.probe_port, timeout=CALL)
    connection.request("GET", "/readyz")
    answer = connection.getresponse()
    found = answer.status, answer.read().decode().strip()
    connection.close()
    return found


async def health(gateway: RunningGateway) -> dict[str, int]:
    """Return what the gateway says of itself, as leader and as the user of the store."""
    stub: Any = health_pb2_grpc.HealthStub(gateway.trainer.channel)
    found = {}
    for service in ("", LEADER, STORE):
        found[service] = (
            await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=CALL)
        ).status
    return found


async def says(gateway: RunningGateway, status: int, reason: str) -> None:
    """Wait for an answer to the kubelet."""
    while (found := await asyncio.to_thread(ready, gateway))[0] != status or reason not in found[1]:
        assert gateway.task is not None
        assert not gateway.task.done(), found
        await asyncio.sleep(0.02)


async def test_one_that_cannot_open_its_term_lets_another_lead(cluster: Cluster, account: Account) -> None:
    await account.allow("-smembers")
    settings = {"leading": False, "lease_seconds": LEASE, "probe_port": 0}
    first = await cluster.gateway(**{**settings, "redis_url": account.url})
    async with asyncio.timeout(CALL):
        await says(first, 503, "NoPermissionError")
    assert await health(first) == {"": NOT_SERVING, LEADER: NOT_SERVING, STORE: NOT_SERVING}
    request = rollout_pb2.GetBatchRequest(run_id="run", batch_id="none")
    with pytest.raises(grpc.aio.AioRpcError, match="this gateway cannot lead") as refused:
        await first.trainer.rollouts.GetBatch(request, timeout=CALL)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert {"ErrorInfo", "RetryInfo"} <= details(refused.value).keys()

    second = await cluster.gateway(**{**settings, "leading": True})
    # It passes calls on, and could still not lead.
    await until(lambda: first.gateway.forwarder.address == second.gateway.address, "it knows who leads")
    async with asyncio.timeout(CALL):
        await says(first, 503, "NoPermissionError")
    assert await health(first) == {"": SERVING, LEADER: NOT_SERVING, STORE: NOT_SERVING}
    with pytest.raises(grpc.aio.AioRpcError) as unknown:
        await first.trainer.rollouts.GetBatch(request, timeout=CALL)
    assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
    await account.allow("+smembers")
    async with asyncio.timeout(CALL):
        await says(first, 200, "ok")
    assert await health(first) == {"": SERVING, LEADER: NOT_SERVING, STORE: SERVING}
    await second.kill()
    await until(lambda: first.gateway.leadership.term is not None, "it leads")


async def test_a_standby_without_redis_is_not_ready_until_it_is_back(
    cluster: Cluster, account: Account
) -> None:
    settings = {"lease_seconds": LEASE, "probe_port": 0}
    leader = await cluster.gateway(**settings)
    standby = await cluster.gateway(leading=False, redis_url=account.url, **settings)
    async with asyncio.timeout(CALL):
        await says(standby, 200, "ok")
        await account.remove()
        await says(standby, 503, "Redis cannot be used: unreachable")
    # Its calls still reach the leader.
    assert await health(standby) == {"": SERVING, LEADER: NOT_SERVING, STORE: NOT_SERVING}
    assert await asyncio.to_thread(ready, leader) == (200, "ok")
    assert (await health(leader))[STORE] == SERVING
    await account.allow("+@all")
    async with asyncio.timeout(CALL):
        await says(standby, 200, "ok")
    assert (await health(standby))[STORE] == SERVING


async def test_one_of_another_format_replaces_no_leader(cluster: Cluster) -> None:
    redis: Any = connect(GatewayConfig(redis_url=cluster.redis_url))
    keys = GatewayKeys(cluster.namespace)
    leader = await cluster.gateway(lease_seconds=LEASE)
    known = await redis.get(keys.format)
    await redis.set(keys.format, "of another release")
    standby = await cluster.gateway(leading=False, lease_seconds=LEASE, probe_port=0)
    async with asyncio.timeout(CALL):
        await says(standby, 503, "the journal in Redis has format of another release")
    await until(lambda: standby.gateway.forwarder.address == leader.gateway.address, "it knows who leads")
    await redis.set(keys.format, known)
    async with asyncio.timeout(CALL):
        await says(standby, 200, "ok")
    # To look records nothing: an empty journal may be one that the leader is about to write.
    await redis.delete(keys.format)
    await LeadershipTerm.check(GatewayConfig(redis_url=cluster.redis_url, namespace=cluster.namespace), redis)
    assert await redis.get(keys.format) is None
    await redis.aclose()
