"""The learner without Redis: nothing that was trained is lost, and it goes on with one that comes back empty."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.platform.redis.embedded import EmbeddedRedis
from tests.integration.drafter.conftest import World, step, until


async def test_it_outlasts_an_outage_and_a_store_that_comes_back_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = EmbeddedRedis(tmp_path / "redis")
    url = server.start()
    folder = tmp_path / "world"
    folder.mkdir()
    world = World(url, "outage", folder)
    monkeypatch.setenv("FAKE_LEARNER", str(world.control))
    try:
        instance = await world.instance()
        learner = await world.learner()
        await world.feed(step(1))
        await until(lambda: instance.version == 1, "the first is loaded")
        # An update that ends while Redis is away is kept, and published when it is back or not at all.
        world.tell("hold")
        await world.feed(step(2))
        await until(lambda: len(world.did("updating")) == 2, "the second update is under way")
        server.kill()
        world.tell("hold", False)
        await until(lambda: len(world.did("updated")) == 2, "the second update is done")
        server.start()
        await world.redis.flushall()
        await world.publishes(1)

        async def works_again() -> bool:
            return learner.metric("leader") == 1 and (await learner.get()).updates >= 2

        await until(works_again, "it leads, and knows what it learned")
        await world.feed(step(3))
        await until(lambda: len(world.did("updated")) >= 3, "it learns from what comes")
        await until(lambda: instance.version > 1, "it publishes, and above what instances have")

        async def agreed() -> bool:
            # The update that was kept through the outage may be published first, and the one after it next.
            return (await learner.get()).drafter_version == instance.version

        await until(agreed, "instances have what it last published")
    finally:
        await world.stack.aclose()
        await world.redis.aclose()
        server.stop()
