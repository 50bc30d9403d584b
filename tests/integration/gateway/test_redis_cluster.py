"""A gateway whose state is spread over the nodes of a Redis Cluster."""

from __future__ import annotations

from pathlib import Path

from tests.integration.gateway.conftest import Cluster, check_samples, make_batch
from tests.support.redis_servers import RedisServer, form_cluster


async def test_a_gateway_and_its_successor_work_on_a_redis_cluster(tmp_path: Path, namespace: str) -> None:
    nodes = [RedisServer.of_cluster(tmp_path / str(number)) for number in range(3)]
    hosts = ",".join(f"127.0.0.1:{node.port}" for node in nodes)
    cluster = Cluster(f"redis+cluster://{hosts}", namespace)
    try:
        for node in nodes:
            node.start()
        form_cluster(nodes)
        gateway = await cluster.gateway()
        fakes = [await cluster.instance(name) for name in ("i0", "i1")]
        await cluster.serving(gateway, 2)
        # Each batch has a slot of its own.
        for _ in range(4):
            request = make_batch(groups=3, samples=2)
            await gateway.trainer.submit(request)
            check_samples(request, await gateway.trainer.collect(request))
        for fake in fakes:
            fake.hold_at = 10
        held = make_batch(groups=3, samples=2)
        await gateway.trainer.submit(held)
        await gateway.kill()
        for fake in fakes:
            fake.hold_at = None
        successor = await cluster.gateway()
        check_samples(held, await successor.trainer.collect(held))
    finally:
        await cluster.close()
        for node in nodes:
            node.kill()
