"""The drafter as an operator sees it: the command, through a gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from prometheus_client import CollectorRegistry

from paceline import AbortedError, AsyncClient, FailedPreconditionError, RetryPolicy, UnavailableError
from paceline.cli.app import run
from services.gateway.config import GatewayConfig
from services.gateway.gateway import Gateway
from services.platform.tasks import end
from tests.integration.drafter.conftest import CALL, World, step, until


@pytest.fixture
async def gateway(world: World) -> AsyncIterator[Gateway]:
    config = GatewayConfig(port=0, redis_url=world.config.redis_url, namespace=world.config.namespace)
    gateway = Gateway(config, CollectorRegistry())
    await gateway.start()
    running = asyncio.create_task(gateway.run())
    yield gateway
    await end([running])
    await gateway.stop(0)


async def test_it_is_shown_and_rolled_back(
    world: World, gateway: Gateway, capsys: pytest.CaptureFixture[str]
) -> None:
    async def command(*arguments: str) -> tuple[int, str, str]:
        status = await asyncio.to_thread(run, ["drafter", *arguments, f"--address={gateway.address}"])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    async with AsyncClient(
        gateway.address, timeout=CALL, leaders_only=False, retry=RetryPolicy(seconds=0)
    ) as client:
        with pytest.raises(UnavailableError, match="keep the drafter"):
            await client.drafter()
        instance = await world.instance()
        await world.learner()
        with pytest.raises(FailedPreconditionError) as nothing:
            await client.roll_back_drafter(0)
        assert nothing.value.reason == "NO_EARLIER_DRAFTER"
        status, _, error = await command("roll-back")
        assert (status, "there is no earlier drafter" in error) == (1, True)

        for number in (1, 2):
            await world.feed(step(number))
            await until(lambda number=number: instance.version == number, f"version {number} is loaded")
        told = await client.drafter()
        assert (told.drafter_version, told.updates, told.rollbacks) == (2, 2, 0)
        assert told.path
        assert told.published_at > 0
        assert "drafter version 2 of " in (await command("show"))[1]

        status, printed, _ = await command("roll-back", "--reason=looks odd")
        assert status == 0
        assert "drafter version 1 is published again, in place of 2\n" in printed
        (decision,) = await world.decided("drafter_rolled_back")
        assert decision.reason == "looks odd"
        # As a call that is made again because its answer was lost.
        with pytest.raises(AbortedError, match="version 1 is published, not 2") as repeated:
            await client.roll_back_drafter(2)
        assert repeated.value.reason == "OTHER_DRAFTER"
        assert (await client.drafter()).drafter_version == 1
