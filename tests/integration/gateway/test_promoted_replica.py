"""A replica that lags is promoted in mid-step: every sample is delivered once and equal, which costs only work."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from services.contracts.gateway_keys import BatchKeys, GatewayKeys
from tests.integration.gateway.conftest import Cluster, check_samples, make_batch, until
from tests.integration.gateway.held import Events, Request, held, hold_on, once_each, read
from tests.support.fake_instance import FakeInstance
from tests.support.redis_servers import RedisServer, ask_to_promote, sentinel_of


class Deployment:
    """A primary, its asynchronous replica and a Sentinel, and what finds Redis by that Sentinel."""

    def __init__(self, folder: Path) -> None:
        self.primary = RedisServer(folder / "primary")
        self.replica = RedisServer(folder / "replica", replicaof=f"127.0.0.1 {self.primary.port}")
        self.sentinel = sentinel_of(folder / "sentinel", self.primary, "main")
        self.cluster = Cluster(f"redis+sentinel://127.0.0.1:{self.sentinel.port}/main", "ns")

    async def replicates(self) -> None:
        replica, sentinel = self.replica.client, self.sentinel.client
        await until(lambda: replica.info("replication")["master_link_status"] == "up", "it replicates")
        await until(lambda: sentinel.sentinel_slaves("main"), "the Sentinel knows the replica")

    async def fail_over(self) -> None:
        await until(lambda: ask_to_promote(self.sentinel, self.replica, "main"), "the replica is promoted")

    def results(self, request: Request) -> list[int]:
        """Return the samples that the primary has in the journal of a batch, and those that the replica has."""
        events = BatchKeys("ns", ("run", request.batch_id)).events
        return [int(server.client.hlen(events)) for server in (self.primary, self.replica)]


@pytest.fixture
async def deployment(tmp_path: Path) -> AsyncIterator[Deployment]:
    deployment = Deployment(tmp_path)
    with deployment.primary, deployment.replica, deployment.sentinel:
        await deployment.replicates()
        yield deployment
        await deployment.cluster.close()


async def _lagging(deployment: Deployment, request: Request) -> tuple[Any, FakeInstance, Events]:
    """Return a gateway, its instance, and what the trainer has of a batch; the replica lacks part of that."""
    gateway, fake = await held(deployment.cluster, request)
    deployment.primary.cut_off(deployment.replica)
    ended = await hold_on(gateway, fake, request, 35)
    head = await read(gateway, request, ended)
    on_primary, on_replica = deployment.results(request)
    assert on_primary == ended > on_replica > 0
    return gateway, fake, head


async def test_a_gateway_writes_again_what_a_promoted_replica_lacks(deployment: Deployment) -> None:
    request = make_batch(groups=8, samples=4, max_tokens=60)
    gateway, fake, head = await _lagging(deployment, request)
    fake.hold_at = None
    deployment.primary.kill()
    await deployment.fail_over()
    tail = await gateway.trainer.collect(request, cursor=head[-1].cursor)
    check_samples(request, head + tail)
    assert gateway.metric("journal_holes_total", kind="hole") > 0
    assert gateway.metric("resubmissions_total", cause="journal") == 0
    # The replica has it all: another gateway delivers it from there.
    await gateway.kill()
    second = await deployment.cluster.gateway()
    check_samples(request, await second.trainer.collect(request))


async def test_what_neither_a_promoted_replica_nor_a_gateway_has_is_generated_again(
    deployment: Deployment,
) -> None:
    request = make_batch(groups=8, samples=4, max_tokens=60)
    gateway, fake, head = await _lagging(deployment, request)
    fake.hold_at = None
    deployment.primary.kill()
    await gateway.kill()
    await deployment.fail_over()
    # The lease of the gateway that was killed has been replicated, and would have to expire.
    deployment.replica.client.delete(GatewayKeys("ns").lease)
    second = await deployment.cluster.gateway()
    await deployment.cluster.serving(second, 1)
    tail = await second.trainer.collect(request, cursor=head[-1].cursor)
    once_each(request, head + tail)
    delivered = {(event.sample.prompt_id, event.sample.slot) for event in head}
    assert delivered & {(event.sample.prompt_id, event.sample.slot) for event in tail}, "nothing was lost"
