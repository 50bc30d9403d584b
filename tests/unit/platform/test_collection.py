"""Garbage collection beside large heaps that are in use."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from services.platform import memory
from services.platform.memory import collect_between, pause_collection
from services.platform.tasks import end

MANY = 1_000_000


class Node:
    """An object that may refer to itself."""

    itself: Node


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """Leave the collector of this process as it was."""
    yield
    gc.enable()
    gc.unfreeze()


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Items of work in memory; they are looked at in every turn of the event loop."""
    monkeypatch.setattr(memory, "_CHECK_SECONDS", 0)
    return [0]


async def looks(work: list[int], number: int = 8) -> bool:
    """Run through so many looks; return whether the collector was enabled then."""
    task = asyncio.create_task(collect_between(lambda: work[0]))
    for _ in range(number):
        await asyncio.sleep(0)
    assert not task.done()
    enabled = gc.isenabled()
    await end([task])
    return enabled


def a_cycle() -> weakref.ref[Node]:
    node = Node()
    node.itself = node
    return weakref.ref(node)


async def test_nothing_is_collected_while_there_is_much_work(work: list[int]) -> None:
    work[0] = MANY
    assert not await looks(work)
    assert gc.isenabled()
    pause_collection(MANY)
    assert not gc.isenabled()
    work[0] = 1
    assert await looks(work)


async def test_what_lives_is_not_looked_at_again(work: list[int]) -> None:
    kept = [Node() for _ in range(100)]
    work[0] = 1
    await looks(work)
    young = {id(each) for each in gc.get_objects()}
    assert not young & {id(each) for each in kept}


async def test_cycles_among_what_was_frozen_are_collected_when_nothing_is_in_work(
    work: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.disable()
    cycle = a_cycle()
    gc.freeze()
    await looks(work)
    assert cycle() is not None, "not so soon after the last"
    monkeypatch.setattr(memory, "_IDLE_SECONDS", 0)
    work[0] = 1
    await looks(work)
    assert cycle() is not None, "not while something is in work"
    work[0] = 0
    await looks(work, 1)
    assert cycle() is None


async def test_work_that_never_ends_does_not_put_a_full_collection_off_for_ever(
    work: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.disable()
    cycle = a_cycle()
    monkeypatch.setattr(memory, "_BUSY_SECONDS", 0)
    work[0] = MANY
    await looks(work, 1)
    assert cycle() is None
