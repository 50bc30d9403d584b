"""The async client makes the same calls; here is what is its own: the event loop."""

import asyncio
from pathlib import Path

import grpc
import numpy as np
import pytest

import paceline
from paceline import AsyncClient, Group, RetryPolicy, SampleRequest
from tests.integration.sdk.gateway_double import GatewayDouble

QUICK = RetryPolicy(seconds=60, initial=0.01, maximum=0.2)


async def test_a_step_through_the_async_run(gateway: GatewayDouble, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    folder = paceline.WeightFolder(tmp_path / "weights", tmp_path / "model")
    async with AsyncClient(gateway.address, retry=QUICK) as client, client.run("run", weights=folder) as run:
        rollout = await run.rollout(0, [Group("a", [1], 3)])
        slots = [sample.slot async for sample in rollout]
        assert slots == [0, 1, 2]
        assert run.stats(0) == rollout.stats()
        assert run.stats(0)["rollout/samples"] == 3
        batch_id = rollout.batch.batch_id
        assert await run.report_rewards(batch_id, [paceline.Reward("a", 0, 1.0)]) == 1
        assert await client.report_rewards("run", batch_id, kl=0.5, clip_fraction=0.25) == 0
        assert await run.report_rewards(batch_id, kl=0.5, clip_fraction=0.25) == 0
        measured = [(each.kl, each.clip_fraction) for each in gateway.state.reports]
        assert measured == [(0.0, 0.0), (0.5, 0.25), (0.5, 0.25)]
        assert await run.hint(1, [Group("a", [1], 3)], policy_version=5) == 3
        assert (await run.push_weights({"w": np.ones(2, np.float32)})).policy_version == 5


async def test_a_gateway_restart_is_invisible_to_an_async_stream(gateway: GatewayDouble) -> None:
    gateway.state.stall_after = 2
    async with AsyncClient(gateway.address, retry=QUICK) as client:
        rollout = await client.run("run").rollout(0, [Group("a", [1], 4)])
        slots = []
        async for sample in rollout:
            slots.append(sample.slot)
            if len(slots) == 1:
                await asyncio.to_thread(gateway.stop)
                gateway.state.stall_after = None
                await asyncio.to_thread(gateway.start)
        assert slots == [0, 1, 2, 3]


async def test_async_errors_are_the_same_classes(gateway: GatewayDouble) -> None:
    gateway.state.failures["GetVersions"] = [(grpc.StatusCode.FAILED_PRECONDITION, "not now", [])]
    async with AsyncClient(gateway.address, retry=QUICK) as client:
        with pytest.raises(paceline.FailedPreconditionError, match="not now"):
            await client.versions()


async def test_async_generate(gateway: GatewayDouble) -> None:
    async with AsyncClient(gateway.address, retry=QUICK) as client:
        events = [event async for event in client.generate(SampleRequest("run", "a", [1]))]
        assert isinstance(events[-1], paceline.Sample)
        assert [len(delta.token_ids) for delta in events[:-1]] == [1, 1]
