"""Several replicas, and what their death costs: their own prompts, and no time."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import structlog

from services.drafts.client import FIRST_DELAY, Fetched, owner
from services.platform.redis.embedded import EmbeddedRedis
from tests.integration.drafts.conftest import CALL, Deployment, connected, refused, until
from tests.unit.drafts.rollouts import make

PROMPTS = [f"gsm8k-{number}" for number in range(60)]
PATIENCE = 4.0
"""The clients' timeout, in seconds."""


def places(*indices: int) -> dict[str, list[str]]:
    """Prompts by the replica that they belong on."""
    shares: dict[str, list[str]] = defaultdict(list)
    for prompt in PROMPTS:
        shares[str(owner("run", prompt, [f"drafts-{index}" for index in indices]))].append(prompt)
    return shares


def failures(logs: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return the calls of a store that failed, with their codes."""
    return [(each["call"], each["code"]) for each in logs if each["event"] == "draft_store_failed"]


async def test_prompts_are_spread_and_found_again(deployment: Deployment) -> None:
    replicas = await asyncio.gather(*map(deployment.replica, range(3)))
    writer, reader = await deployment.client(3), await deployment.client(3)
    assert await writer.put([make(prompt, slot) for prompt in PROMPTS for slot in range(2)]) == 120
    shares = places(0, 1, 2)
    counts = [(await replica.stats()).prompts for replica in replicas]
    assert counts == [len(shares[f"drafts-{index}"]) for index in range(3)]
    assert min(counts) > 5
    found = (await reader.fetch("run", PROMPTS)).rollouts
    assert sorted({each.prompt_id for each in found}) == sorted(PROMPTS)
    assert len(found) == 120


async def test_a_killed_replica_costs_only_its_own_prompts(deployment: Deployment) -> None:
    replicas = await asyncio.gather(*map(deployment.replica, range(3)))
    stores = await deployment.client(3, seconds=PATIENCE)
    rollouts = [make(prompt) for prompt in PROMPTS]
    await stores.put(rollouts)
    shares = places(0, 1, 2)
    others = {*shares["drafts-0"], *shares["drafts-2"]}
    await asyncio.to_thread(replicas[1].child.kill)
    fetched = await stores.fetch("run", PROMPTS)
    assert {each.prompt_id for each in fetched.rollouts} == others
    assert fetched.missed == {*shares["drafts-1"]}
    assert await stores.put(rollouts) == len(others)
    assert stores.available

    # Once its record has expired, its prompts live elsewhere.
    await until(lambda: len(stores.replicas) == 2, "the dead replica is forgotten")
    assert await stores.put(rollouts) == len(PROMPTS)
    assert len((await stores.fetch("run", PROMPTS)).rollouts) == len(PROMPTS)
    counts = [(await replicas[index].stats()).prompts for index in (0, 2)]
    assert sum(counts) == len(PROMPTS)

    # It comes back under its name, with what belongs to it.
    await replicas[1].start()
    await connected(stores, 3)
    assert await stores.put(rollouts) == len(PROMPTS)
    assert (await replicas[1].stats()).prompts == len(shares["drafts-1"])


async def test_a_replica_that_hangs_is_waited_for_once_and_then_left_alone(deployment: Deployment) -> None:
    replicas = await asyncio.gather(*map(deployment.replica, range(2)))
    stores = await deployment.client(2, seconds=PATIENCE)
    await stores.put([make(prompt) for prompt in PROMPTS])
    answering = places(0, 1)["drafts-0"]
    await deployment.freeze(replicas[1])
    try:
        with structlog.testing.capture_logs() as logs:
            fetched = await stores.fetch("run", PROMPTS)
            failed = time.monotonic()
            assert {each.prompt_id for each in fetched.rollouts} == {*answering}
            assert fetched.missed == {*PROMPTS} - {*answering}
            assert failures(logs) == [("fetch", "DEADLINE_EXCEEDED")]
            assert await stores.put([make(prompt) for prompt in PROMPTS]) == len(answering)
        # A second call of it would have failed, too; it is tried once more when it was left alone for a while.
        if time.monotonic() - failed < FIRST_DELAY:
            assert len(failures(logs)) == 1, "it called a replica that had just failed"
    finally:
        replicas[1].child.signal(signal.SIGCONT)
    await until(lambda: has_all(stores), "the replica is called again")


async def has_all(stores) -> bool:  # type: ignore[no-untyped-def]
    return len((await stores.fetch("run", PROMPTS)).rollouts) == len(PROMPTS)


async def test_without_a_store_nothing_is_stored_and_nobody_waits(deployment: Deployment) -> None:
    stores = await deployment.client(0)
    assert not stores.available
    assert await stores.put([make("a")]) == 0
    assert await stores.fetch("run", ["a"]) == Fetched([], frozenset({"a"}))


async def test_when_all_are_dead_nobody_waits_until_they_are_back(deployment: Deployment) -> None:
    replica = await deployment.replica()
    stores = await deployment.client(1, seconds=PATIENCE)
    await asyncio.to_thread(replica.child.kill)
    await until(lambda: refused(stores), "it is left alone for a while")
    # Far less than they would take if each waited.
    async with asyncio.timeout(CALL):
        for _ in range(200):
            assert (await stores.fetch("run", ["a"])).rollouts == []
    await replica.start()
    await until(lambda: stores.put([make("a")]), "the new process is found")
    assert stores.available


async def test_a_caller_that_gives_up_is_let_go(deployment: Deployment) -> None:
    replica = await deployment.replica()
    stores = await deployment.client(1)
    await deployment.freeze(replica)
    call = asyncio.create_task(stores.fetch("run", ["a"]))
    await asyncio.sleep(0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await call
    assert call.cancelled()


async def test_closing_ends_calls_under_way_without_an_error(deployment: Deployment) -> None:
    replica = await deployment.replica()
    stores = await deployment.client(1)
    await deployment.freeze(replica)
    calls = [asyncio.create_task(stores.fetch("run", ["a"])), asyncio.create_task(stores.put([make("a")]))]
    done, _ = await asyncio.wait(calls, timeout=0.2)
    assert not done
    await stores.close()
    async with asyncio.timeout(CALL / 2):
        assert await asyncio.gather(*calls) == [Fetched([], frozenset({"a"})), 0]


async def test_stores_are_used_on_while_redis_is_away(namespace: str, tmp_path: Path) -> None:
    redis = EmbeddedRedis(tmp_path / "redis")
    with ThreadPoolExecutor(1) as spawner:
        deployment = Deployment(redis.start(), namespace, tmp_path, spawner)
        try:
            replica = await deployment.replica()
            stores = await deployment.client(1)
            redis.kill()
            assert await stores.put([make("a")]) == 1
            assert len((await stores.fetch("run", ["a"])).rollouts) == 1
            redis.start()
            assert replica.child.alive
            await until(lambda: len(stores.replicas) == 1, "the replica is registered again")
            assert len((await stores.fetch("run", ["a"])).rollouts) == 1
        finally:
            await deployment.close()
            redis.stop()
