"""Open batches as a trainer has them: added to while they are read, over lost gateways, lost batches and shards."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from paceline import (
    AsyncClient,
    AsyncOpenBatch,
    Client,
    FailedPreconditionError,
    Group,
    SamplingParams,
    Stale,
)
from paceline.shards import Shards
from services.contracts.gateway_keys import BatchKeys
from services.gateway.config import GatewayConfig
from services.platform.redis.connection import connect
from tests.integration.gateway.conftest import CALL, Cluster, RunningGateway
from tests.integration.gateway.test_shards import (
    GROUPS,
    KEYS,
    LEASE,
    LIMIT,
    RETRY,
    SAMPLING,
    SEED,
    STEP,
    Deployment,
    expected,
    hold,
    named,
    shards,
    tokens,
)
from tests.support.ports import free_port

__all__ = ["shards"]


async def serving(cluster: Cluster) -> Deployment:
    gateway = await cluster.gateway(port=free_port(), lease_seconds=LEASE)
    deployment = Deployment(cluster, gateway, await cluster.instance("i0", max_running=64))
    await cluster.serving(gateway, 1)
    return deployment


def address(gateway: RunningGateway) -> str:
    return gateway.gateway.address


async def test_a_trainer_adds_what_it_still_needs_while_it_reads(cluster: Cluster) -> None:
    """Dynamic sampling: groups that are of no use are replaced, until there are enough."""
    deployment = await serving(cluster)
    async with (
        AsyncClient(address(deployment.gateway), retry=RETRY) as client,
        client.run("run", seed=SEED) as run,
        run.open_batch(STEP, SAMPLING) as batch,
    ):
        left, kept = list(GROUPS), list[str]()
        assert await batch.add(left[:4]) == 32
        del left[:4]
        async for group in batch.by_group():
            assert [sample.slot for sample in group] == list(range(8))
            kept.append(group[0].prompt_id)
            if left:
                await batch.add([left.pop(0)])
            else:
                # Repeated: it costs nothing.
                assert await batch.add(GROUPS) == 0
            if len(kept) == len(GROUPS):
                await batch.close()
        assert sorted(kept) == sorted(group.prompt_id for group in GROUPS)
        assert (batch.complete, len(batch)) == (True, len(KEYS))
        assert await batch.ack() == len(KEYS)


async def test_a_task_adds_while_another_waits_for_samples(cluster: Cluster) -> None:
    deployment = await serving(cluster)
    async with (
        AsyncClient(address(deployment.gateway), retry=RETRY) as client,
        client.run("run", seed=SEED) as run,
    ):
        async with run.open_batch(STEP, SAMPLING) as batch:
            reading = asyncio.create_task(_all(batch))
            await batch.add(GROUPS[:6])
            await batch.add(GROUPS[6:])
        assert tokens(await reading) == expected()
        with pytest.raises(FailedPreconditionError) as error:
            await batch.add([Group("late", [1], 1)])
        assert error.value.reason == "BATCH_CLOSED"
        # What could not be added is no part of the batch.
        assert len(batch) == len(KEYS)


async def _all(batch: AsyncOpenBatch) -> list[object]:
    return [sample async for sample in batch]


async def test_an_open_batch_outlives_its_gateway(cluster: Cluster) -> None:
    deployment = await serving(cluster)
    deployment.fake.hold_at = 5
    async with (
        AsyncClient(address(deployment.gateway), retry=RETRY) as client,
        client.run("run", seed=SEED) as run,
        run.open_batch(STEP, SAMPLING) as batch,
    ):
        await batch.add(GROUPS[:6])
        reading = asyncio.create_task(_all(batch))
        await deployment.restart()
        await batch.add(GROUPS[6:])
        deployment.fake.hold_at = None
        await batch.close()
        assert tokens(await reading) == expected()


@pytest.mark.parametrize("closed", [False, True])
async def test_a_batch_that_is_lost_with_its_gateway_is_added_again(cluster: Cluster, closed: bool) -> None:
    deployment = await serving(cluster)
    async with (
        AsyncClient(address(deployment.gateway), retry=RETRY) as client,
        client.run("run", seed=SEED) as run,
        run.open_batch(STEP, SAMPLING) as batch,
    ):
        await batch.add(GROUPS[:6])
        async with asyncio.timeout(CALL), aclosing(aiter(batch)) as reading:
            samples = [await anext(reading) for _ in range(3)]
        if closed:
            await batch.close()
        await deployment.gateway.kill()
        redis = connect(GatewayConfig(redis_url=cluster.redis_url))
        await redis.delete(*BatchKeys(cluster.namespace, ("run", batch.batch.batch_id)).all)
        await redis.aclose()
        deployment.gateway = await cluster.gateway(
            port=deployment.gateway.gateway.server.port, lease_seconds=LEASE
        )
        await cluster.serving(deployment.gateway, 1)
        if not closed:
            # It is the first call that meets the gateway without the batch.
            await batch.add(GROUPS[6:])
            await batch.close()
        samples += await _all(batch)
        wanted = {key: value for key, value in expected().items() if key[0] in _prompts(6 if closed else 12)}
        assert tokens(samples) == wanted


def _prompts(count: int) -> set[str]:
    return {group.prompt_id for group in GROUPS[:count]}


async def test_a_trainer_that_was_restarted_adds_its_groups_again_in_other_portions(cluster: Cluster) -> None:
    deployment = await serving(cluster)
    where = address(deployment.gateway)

    async def interrupted() -> None:
        async with (
            AsyncClient(where, retry=RETRY) as client,
            client.run("run", seed=SEED) as run,
            run.open_batch(STEP, SAMPLING) as batch,
        ):
            await batch.add(GROUPS[:6])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await interrupted()
    async with AsyncClient(where, retry=RETRY) as client, client.run("run", seed=SEED) as run:
        async with run.open_batch(STEP, SAMPLING) as batch:
            assert batch.submitted.already_submitted
            groups = batch.by_group()
            # Of groups that this trainer has not added yet, nothing is whole.
            assert await batch.add(GROUPS[:1]) == 0
            assert [sample.prompt_id for sample in await anext(groups)] == ["p0"] * 8
            assert await batch.add(GROUPS) == 48
        found = [group async for group in batch.by_group()]
        assert sorted(group[0].prompt_id for group in found) == sorted(_prompts(12) - {"p0"})


async def test_an_open_batch_over_two_shards_has_the_samples_of_one(shards: list[Deployment]) -> None:
    async with AsyncClient(named(shards), retry=RETRY) as client, client.run("run", seed=SEED) as run:
        async with run.open_batch(STEP, SAMPLING, max_staleness=1, stale=Stale.REGENERATE) as batch:
            hold(shards, 5)
            reading = asyncio.create_task(_all(batch))
            for group in GROUPS:
                await batch.add([group])
            await shards[0].restart()
            hold(shards, None)
            # However they are divided, groups come to the same shards.
            assert await batch.add(GROUPS) == 0
            assert all(part for part in _spread(client))
        assert tokens(await reading) == expected()
    assert shards[0].prompts() | shards[1].prompts() == _prompts(12)
    assert not shards[0].prompts() & shards[1].prompts()


def _spread(client: AsyncClient) -> list[list[Group]]:
    members: Shards = client.shards
    return [members.spread(GROUPS)[name] for name in "ab"]


async def test_the_blocking_client_does_the_same(shards: list[Deployment]) -> None:
    def train() -> None:
        for where in (address(shards[0].gateway), named(shards)):
            with Client(where, retry=RETRY) as client, client.run(f"run-{len(where)}", seed=SEED) as run:
                with run.open_batch(STEP, SamplingParams(max_tokens=LIMIT)) as batch:
                    assert batch.add(GROUPS[:6]) == 48
                    found = [next(groups := batch.by_group())]
                    assert batch.add(GROUPS) == 48
                    assert batch.close() == len(KEYS)
                    found += groups
                assert tokens([sample for group in found for sample in group]) == expected()
                with pytest.raises(FailedPreconditionError):
                    batch.add([Group("late", [1], 1)])
                with pytest.raises(ZeroDivisionError), run.open_batch(STEP, SAMPLING) as second:
                    raise ZeroDivisionError
                assert second.add(GROUPS[:1]) == 8, "it stays open"

    await asyncio.to_thread(train)
