"""Weights that go to several deployments by stream, in one pass over the trainer's tensors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline import AsyncClient, Client, RetryPolicy, Shard
from tests.unit.gateway.scheduler_parts import VERSION
from tests.unit.gateway.stream_fleet import NEW, STREAM, WAIT, StreamFleet, Tensors, stream_fleet, until

IMPATIENT = RetryPolicy(seconds=0.5, initial=0.05)


@pytest.fixture
async def fleets(tmp_path: Path) -> AsyncIterator[list[StreamFleet]]:
    """Two deployments of two instances."""
    async with AsyncExitStack() as stack:
        found = list[StreamFleet]()
        for name in "ab":
            (tmp_path / name).mkdir()
            found.append(await stack.enter_async_context(stream_fleet(tmp_path / name, 2)))
        yield found


def named(fleets: list[StreamFleet]) -> list[Shard]:
    return [Shard(str(fleet.client.address), name) for name, fleet in zip("ab", fleets, strict=True)]


class Passes(Tensors):
    """Tensors that count how often they are read."""

    passes = 0

    def __iter__(self) -> Iterator[str]:
        self.passes += 1
        return super().__iter__()


async def push(fleets: list[StreamFleet], tensors: Any, **changes: Any) -> paceline.UpdateFinished:
    async with asyncio.timeout(WAIT), AsyncClient(named(fleets), retry=IMPATIENT) as client:
        run = client.run("run", weights=replace(STREAM, **changes))
        return await run.push_weights(tensors)


@pytest.mark.parametrize("blocking", [False, True], ids=["aio", "blocking"])
@pytest.mark.parametrize("once", [False, True], ids=["mapping", "iterator"])
async def test_all_shards_get_the_tensors_in_one_pass(
    fleets: list[StreamFleet], blocking: bool, once: bool
) -> None:
    tensors = Passes()
    source: Any = ((name, tensors[name]) for name in tensors) if once else tensors

    def push_blocking() -> paceline.UpdateFinished:
        with Client(named(fleets), retry=IMPATIENT) as client:
            return client.run("run", weights=STREAM).push_weights(source)

    finished = await (asyncio.to_thread(push_blocking) if blocking else push(fleets, source))
    assert (finished.policy_version, [each.applied for each in finished.instances]) == (NEW, [True] * 4)
    assert tensors.passes == 1
    for fleet in fleets:
        size = fleet.check(fleet.nodes)
        assert [node.received for node in fleet.nodes] == [(size, 0), (0, size)]


@pytest.mark.parametrize("once", [False, True], ids=["mapping", "iterator"])
async def test_an_instance_that_dies_in_mid_stream_costs_no_shard_the_update(
    fleets: list[StreamFleet], once: bool
) -> None:
    victim = fleets[1].nodes[0]

    async def kill() -> None:
        await until(lambda: sum(victim.received) > 0, "the instance receives")
        await fleets[1].kill(victim)

    tensors = Tensors(fleets[1].once(kill))
    # Enough is kept to go on at the other instance.
    source: Any = ((name, tensors[name]) for name in tensors) if once else tensors
    finished = await push(fleets, source, window_bytes=1 << 30)
    assert finished.policy_version == NEW
    fleets[0].check(fleets[0].nodes)
    fleets[1].check(fleets[1].nodes[1:])


async def test_a_shard_without_instances_is_named_and_no_other_applies_the_version(
    fleets: list[StreamFleet],
) -> None:
    async def kill() -> None:
        for node in fleets[1].nodes:
            await fleets[1].kill(node)

    with pytest.raises(paceline.PacelineError) as raised:
        await push(fleets, Tensors(fleets[1].once(kill)), give_up_seconds=1.0, stall_seconds=1.0)
    assert (raised.value.shard, raised.value.served) == ("b", {"a": VERSION, "b": VERSION})
    assert [node.version for node in fleets[0].nodes] == [VERSION, VERSION]
    assert (await fleets[0].client.versions()).update_id == ""
    # The shard that is left can be pushed to by itself.
    await fleets[0].push(Tensors())
    fleets[0].check(fleets[0].nodes)


async def test_an_error_of_the_tensors_is_raised_as_it_is_and_leaves_all_shards(
    fleets: list[StreamFleet],
) -> None:
    def broken() -> Iterator[tuple[str, Any]]:
        yield "w0", Tensors()["w0"]
        raise KeyError("a trainer's own fault")

    with pytest.raises(KeyError, match="own fault"):
        await push(fleets, broken())
    assert [(await fleet.client.versions()).update_id for fleet in fleets] == ["", ""]
    assert (await push(fleets, Tensors())).policy_version == NEW
