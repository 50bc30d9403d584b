"""Two scripted instances, a caller of both, and what must hold when a test is over."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from paceline.internal.v1 import generation_pb2 as pb
from tests.support.instances import item
from tests.support.moving import Journey, Movers, moving, reason
from tests.unit.migration.scripted_kv import MOST, PACE, VERSION, KvEngine, ScriptedInstance, scripted

PROMPT = 21
LENGTH = 400
WAIT = 60.0


@pytest.fixture(autouse=True)
def pace() -> None:
    """Engines begin each test at the same pace, and keep their samples from ending."""
    KvEngine.pace, KvEngine.most = PACE, MOST


@pytest.fixture
def limits() -> dict[str, Any]:
    """Settings of the instances; for a test to parametrize."""
    return {}


@pytest.fixture
async def places(pace: None, limits: dict[str, Any]) -> AsyncIterator[list[ScriptedInstance]]:
    """Two instances. Afterwards nothing is left in either: no sample, no block, nobody who watches."""
    async with scripted(**limits) as made:
        yield made
        KvEngine.hurry()
        for each in made:
            if not each.loop.is_alive():
                continue
            each.pass_deadlines()
            async with asyncio.timeout(WAIT):
                while not await each.between_steps(lambda place=each: is_empty(place)):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)


def is_empty(place: ScriptedInstance) -> bool:
    """Whether nothing is in the engine, expected, or held back."""
    engine = place.engine.migration
    held = (place.loop.samples, place.loop.watchers, engine.paused, engine.reserved, engine.tables)
    return (
        not any(held) and not len(place.migration.arrivals) and len(engine.free) == engine.space.total_blocks
    )


@pytest.fixture
async def movers(places: list[ScriptedInstance]) -> AsyncIterator[Movers]:
    """A caller of both."""
    async with moving(*[each.address for each in places]) as caller:
        yield caller


def asked(handle: int, **fields: Any) -> pb.WorkItem:
    """Return an item with a prompt of its own."""
    chosen = random.Random(handle)
    prompt = [chosen.randrange(8000) for _ in range(PROMPT)]
    own: dict[str, Any] = {"policy_version": VERSION, "seed": handle, "max_tokens": LENGTH}
    return item(handle, prompt, **(own | fields))


async def claimed(movers: Movers, handle: int) -> None:
    """Wait for tokens of a moved sample that come from where it is now."""
    known = max(KvEngine.most, len(movers.journeys[handle].tokens))
    KvEngine.most = known + 50
    await movers.tokens(known + 10, handle)


async def hurry(movers: Movers, *handles: int) -> dict[int, Journey]:
    """Let samples end: nothing more is to happen to them."""
    KvEngine.hurry()
    return await movers.ended(*handles)


def check(journey: Journey, length: int = LENGTH) -> None:
    """The sample is what the script says, whole and once."""
    assert reason(journey) == "LENGTH"
    assert journey.tokens == list(range(length))
    assert journey.logprobs == [-float(token) for token in range(length)]
