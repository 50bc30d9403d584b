"""An instance that is to end waits for its samples to be moved away, if a reallocator would do it, for a while."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from paceline.internal.v1 import generation_pb2 as pb
from tests.support.instances import item
from tests.support.models import tiny_model
from tests.unit.generation.test_service import WAIT, Rig

# Who waits for this, waits for ever.
LONG = 3600.0


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    """Its engine does not step until it may."""
    model = tiny_model(tmp_path / "model", num_hidden_layers=1)
    made = Rig(model, evacuation_seconds=WAIT, speculation="off")
    made.engine.permits = 0
    yield made
    made.loop.stop()
    made.loop.join(WAIT)


@pytest.fixture
async def running(rig: Rig) -> AsyncIterator[asyncio.Task[list[int]]]:
    """A sample in the engine; the task ends with its finish reasons."""

    async def requests() -> AsyncIterator[pb.WorkRequest]:
        yield pb.WorkRequest(start=[item(1, [1], max_tokens=3)])
        await asyncio.Event().wait()

    async def read() -> list[int]:
        async for response in rig.service.Work(requests(), None):  # type: ignore[arg-type]
            if response.finished:
                return [each.finish_reason for each in response.finished]
        return []

    reading = asyncio.create_task(read())
    async with asyncio.timeout(WAIT):
        while not rig.loop.samples.real_count:  # noqa: ASYNC110 (the engine thread sets no event)
            await asyncio.sleep(0.005)
    yield reading
    reading.cancel()
    with suppress(asyncio.CancelledError):
        await reading


async def test_it_waits_until_it_is_empty(rig: Rig, running: asyncio.Task[list[int]]) -> None:
    rig.reallocator = True
    evacuating = asyncio.create_task(rig.instance.evacuate(LONG))
    done, _ = await asyncio.wait({evacuating}, timeout=0.1)
    assert not done
    assert rig.instance.state == "draining"
    rig.loop.call(lambda: rig.engine.allow(10))
    await asyncio.wait_for(evacuating, WAIT)
    assert rig.loop.samples.real_count == 0
    assert await rig.instance.drain() == 0, "nothing is left to be handed back"


async def test_where_nobody_would_empty_it_samples_are_handed_back_at_once(
    rig: Rig, running: asyncio.Task[list[int]]
) -> None:
    assert await asyncio.wait_for(rig.instance.drain(LONG), WAIT) == 1
    assert await asyncio.wait_for(running, WAIT)


async def test_what_is_left_at_the_deadline_is_handed_back(
    rig: Rig, running: asyncio.Task[list[int]]
) -> None:
    rig.reallocator = True
    assert await rig.instance.drain(0.05) == 1
    assert await asyncio.wait_for(running, WAIT)


async def test_a_paused_instance_is_not_waited_for(rig: Rig, running: asyncio.Task[list[int]]) -> None:
    rig.reallocator = True
    await rig.instance.pause(True)
    assert await asyncio.wait_for(rig.instance.drain(LONG), WAIT) == 1


async def test_one_that_is_to_stay_after_all_keeps_its_samples(
    rig: Rig, running: asyncio.Task[list[int]]
) -> None:
    rig.reallocator = True
    draining = asyncio.create_task(rig.instance.drain(LONG))
    async with asyncio.timeout(WAIT):
        while rig.instance.state != "draining":  # noqa: ASYNC110 (nothing is set when it is)
            await asyncio.sleep(0.005)
    await rig.instance.pause(False)
    assert await asyncio.wait_for(draining, WAIT) == 0
    assert (rig.instance.state, rig.loop.samples.real_count) == ("serving", 1)
