"""A Redis that takes no writes for a while in mid-step: the step waits, nothing ends, and all samples are equal."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.platform.grpc.server import STORE
from tests.integration.gateway.conftest import (
    Cluster,
    RunningGateway,
    Trainer,
    check_samples,
    details,
    make_batch,
    until,
)
from tests.support.fake_instance import FakeInstance
from tests.support.redis_servers import BreakableServer

INSTANCES = ("i0", "i1")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BreakableServer]:
    with BreakableServer(tmp_path_factory.mktemp("breakable")) as server:
        yield server


async def _store_health(trainer: Trainer) -> int:
    stub = health_pb2_grpc.HealthStub(trainer.channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=STORE), timeout=60)
    return answer.status


async def _accepted(gateway: RunningGateway, request: object) -> bool:
    try:
        await gateway.trainer.submit(request)  # type: ignore[arg-type]
    except grpc.aio.AioRpcError as error:
        # The memory of a full Redis, which the gateway reads every second, refuses batches until it is read again.
        if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED):
            raise
        return False
    return True


@pytest.mark.parametrize("how", ["full", "read_only"])
async def test_a_step_waits_for_redis_to_take_writes_again(
    server: BreakableServer, namespace: str, how: str
) -> None:
    cluster = Cluster(server.url, namespace)
    try:
        gateway = await cluster.gateway()
        fakes = [await cluster.instance(name) for name in INSTANCES]
        for fake in fakes:
            fake.hold_at = 10
        await cluster.serving(gateway, 2)
        request = make_batch(groups=6, samples=4)
        await gateway.trainer.submit(request)
        stream = gateway.trainer.stream(request)
        await until(lambda: sum(len(f.accepted) for f in fakes) == 24, "all are placed")
        await until(lambda: all(s.length == 10 for f in fakes for s in f.running()), "all are held")
        server.break_(how)
        for fake in fakes:
            fake.hold_at = None
        await until(lambda: not any(f.running() for f in fakes), "all samples have ended")
        assert not await _accepted(gateway, make_batch())

        async def says_so() -> bool:
            return await _store_health(gateway.trainer) == health_pb2.HealthCheckResponse.NOT_SERVING

        async def says_all_is_well() -> bool:
            return await _store_health(gateway.trainer) == health_pb2.HealthCheckResponse.SERVING

        await until(says_so, "health says so")
        registered = f"{namespace}:{{registry:generation}}:instance:*"
        if how == "read_only":
            await until(lambda: not server.client.keys(registered), "the records have expired")
        assert len(gateway.links()) == 2
        server.mend()
        check_samples(request, [event async for event in stream])
        again = make_batch()
        await until(lambda: _accepted(gateway, again), "the next batch is accepted")
        check_samples(again, await gateway.trainer.collect(again))
        assert [gateway.metric("instance_losses_total", instance_id=name) for name in INSTANCES] == [0, 0]
        assert gateway.task is not None
        assert not gateway.task.done()
        assert all(not task.done() for fake in fakes for task in fake._tasks)
        await until(says_all_is_well, "health says that writes are taken")
    finally:
        server.mend()
        await cluster.close()


@pytest.mark.parametrize("restarted", [False, True])
async def test_what_redis_does_not_take_is_bounded_and_the_rest_stays_with_the_instances(
    server: BreakableServer, namespace: str, restarted: bool
) -> None:
    cluster = Cluster(server.url, namespace)
    try:
        # Seven samples of 40 tokens are more than that.
        gateway = await cluster.gateway(max_unwritten_bytes=2048)
        fakes = [await cluster.instance(name, max_running=4) for name in INSTANCES]
        for fake in fakes:
            fake.hold_at = 10
        await cluster.serving(gateway, 2)
        request = make_batch(groups=6, samples=4, ignore_eos=True)
        await gateway.trainer.submit(request)
        stream = gateway.trainer.stream(request)
        await until(lambda: _held(fakes) >= 8, "the instances are full")
        server.break_("full")
        for fake in fakes:
            fake.hold_at = None
        await until(lambda: gateway.metric("paused") == 1, "it pauses")
        await until(lambda: not any(f.running() for f in fakes), "the instances have ended what they have")
        assert sum(len(fake.accepted) for fake in fakes) < 24
        assert gateway.metric("queued_samples") > 0
        assert 0.5 < gateway.metric("unwritten_ratio") < 3
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await gateway.trainer.submit(make_batch())
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert details(error.value)["QuotaFailure"].violations[0].subject == "unwritten_bytes"

        async def says_so() -> bool:
            return await _store_health(gateway.trainer) == health_pb2.HealthCheckResponse.NOT_SERVING

        await until(says_so, "health says so")
        if restarted:
            stream.cancel()
            await gateway.kill()
            server.mend()
            gateway = await cluster.gateway()
            stream = gateway.trainer.stream(request)
        server.mend()
        check_samples(request, [event async for event in stream])
        await until(lambda: gateway.metric("unwritten_ratio") == 0, "all is written")
        assert gateway.metric("paused") == 0

        async def says_all_is_well() -> bool:
            return await _store_health(gateway.trainer) == health_pb2.HealthCheckResponse.SERVING

        await until(says_all_is_well, "health says that writes are taken")
    finally:
        server.mend()
        await cluster.close()


def _held(fakes: list[FakeInstance]) -> int:
    """Return how many samples wait at token 10."""
    return sum(sample.length == 10 for fake in fakes for sample in fake.running())
