"""How an instance comes, leaves and breaks, as the fleet and its callers see it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.internal.v1 import generation_pb2 as pb
from paceline.v1 import fleet_pb2
from services.platform.config import ServiceConfig
from services.platform.redis.connection import Keys, connect
from services.platform.redis.registry import InstanceRecord, Registry
from tests.integration.generation.conftest import NAMESPACE, Policy
from tests.support.instances import BREAKS_AT, CALL, InstanceProcess, calling, stub_of
from tests.support.waiting import until

# Samples are stopped by a pause, so that this need not last.
LONG: dict[str, Any] = {"max_tokens": 250, "ignore_eos": True}


@pytest.fixture
async def registry(redis_url: str) -> AsyncIterator[Registry]:
    """The fleet as the gateway looks it up."""
    async with connect(ServiceConfig(redis_url=redis_url)) as store:
        yield Registry(store, Keys(NAMESPACE))


async def record_of(registry: Registry, name: str) -> InstanceRecord | None:
    return (await registry.list("generation")).get(name)


async def registered(registry: Registry, name: str) -> InstanceRecord:
    """The record of an instance that serves. If it expired, the next heartbeat brings it back."""
    await until(lambda: record_of(registry, name), f"{name} is registered")
    record = await record_of(registry, name)
    assert record is not None
    return record


async def exit_status(process: InstanceProcess) -> int:
    return await asyncio.to_thread(process.wait)


async def test_a_serving_instance_is_registered_and_healthy(policy: Policy, registry: Registry) -> None:
    record = await registered(registry, "shared")
    described = (await policy.look()).instance
    assert (record.address, record.epoch) == (described.address, described.epoch)
    assert (record.max_running, record.max_model_len, record.vocab_size) == (32, 512, 512)
    async with grpc.aio.insecure_channel(policy.address) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=CALL)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_an_instance_that_is_loading_stops_when_it_is_told_to(
    models: tuple[Path, Path], start: Callable[..., InstanceProcess], registry: Registry
) -> None:
    process = start(models[0], "loading")
    process.launch()
    try:
        await until(lambda: "loading" in process.log_tail(), "the instance loads")
        process.terminate()
        assert await exit_status(process) == 0
    finally:
        process.kill()
    assert "stopped_while_loading" in process.log_tail()
    assert await record_of(registry, "loading") is None


async def test_sigterm_hands_every_sample_back_and_ends_cleanly(
    fresh: Policy, successor: InstanceProcess, registry: Registry
) -> None:
    handles = range(1, 36)
    whole = await fresh.tokens(handles, **LONG)
    await registered(registry, "successor")
    # More than run at once. Paused: none of them ends before it is told to.
    async with fresh.midway(handles, begun=3, **LONG) as (caller,):
        successor.terminate()
        assert await caller.rest() == grpc.StatusCode.OK
        outcomes = {handle: caller.of(handle) for handle in handles}
    assert {outcome.reason for outcome in outcomes.values()} == {"ABORTED"}
    for handle, outcome in outcomes.items():
        assert outcome.tokens == whole[handle][: len(outcome.tokens)]
    assert await exit_status(successor) == 0
    assert await record_of(registry, "successor") is None


async def test_a_drained_instance_hands_back_takes_nothing_and_can_still_be_asked(
    fresh: Policy, successor: InstanceProcess, registry: Registry
) -> None:
    whole = await fresh.tokens([1, 2], **LONG)
    async with fresh.midway([1, 2], **LONG) as (caller,):
        drained = await fresh.stub.DrainEngine(pb.DrainEngineRequest(), timeout=CALL)
        assert drained.handed_over == 2
        outcomes = await caller.ended(1, 2)
        for handle, outcome in outcomes.items():
            assert outcome.reason == "ABORTED"
            assert outcome.tokens == whole[handle][: len(outcome.tokens)]
        # The stream itself goes on, and refuses.
        await caller.send([fresh.item(3)])
        refused = (await caller.ended(3))[3].refused
        assert refused is not None
        assert refused.code == grpc.StatusCode.FAILED_PRECONDITION.value[0]
        assert "draining" in refused.message
    assert (await fresh.look()).instance.state == fleet_pb2.INSTANCE_STATE_DRAINING

    async def drains() -> bool:
        record = await record_of(registry, "successor")
        return record is not None and record.state == "draining"

    await until(drains, "its record says that it drains")
    again = await fresh.stub.DrainEngine(pb.DrainEngineRequest(), timeout=CALL)
    assert again.handed_over == 0
    successor.terminate()
    assert await exit_status(successor) == 0


async def test_a_broken_engine_ends_its_streams_and_its_process(
    start: Callable[..., InstanceProcess], models: tuple[Path, Path], registry: Registry, policy: Policy
) -> None:
    whole = await policy.tokens([1, 2], **LONG)
    module = "tests.support.breaking_instance"
    with start(models[0], "breaking", module=module, speculation="off") as process:
        async with stub_of(process.address) as stub, calling(process.address) as caller:
            breaking = Policy(process.address, stub)
            await breaking.look()
            short = await breaking.tokens([1, 2], max_tokens=BREAKS_AT, ignore_eos=True)
            assert short == {handle: whole[handle][:BREAKS_AT] for handle in (1, 2)}
            await registered(registry, "breaking")
            async with calling(process.address) as idle:
                # Answered, so that the stream is known to be open.
                await idle.send([breaking.item(9, [])])
                await idle.ended(9)
                await caller.send([breaking.item(handle, **LONG) for handle in (1, 2)])
                assert await caller.rest() == grpc.StatusCode.UNAVAILABLE
                assert await idle.rest() == grpc.StatusCode.UNAVAILABLE
        for handle in (1, 2):
            assert caller.of(handle).finished is None
            assert caller.of(handle).tokens == whole[handle][:BREAKS_AT]
        assert await exit_status(process) == 1
        assert "the device is lost" in process.log.read_text()
    assert await record_of(registry, "breaking") is None
