"""Restarts of a store: with a valid snapshot nothing is lost."""

from __future__ import annotations

import asyncio
import time

from paceline.times import seconds_of
from services.drafts.client import DraftStores
from tests.integration.drafts.conftest import Deployment, StoreProcess, until
from tests.unit.drafts.rollouts import ahead, describe, make

HISTORY = [make(f"p{number}", slot, step=2) for number in range(20) for slot in range(4)]
DRAFTS = [ahead(f"p{number}", step=3) for number in range(20)]
PROMPTS = [f"p{number}" for number in range(20)]
NEVER = "--snapshot-interval-seconds=3600"


async def saved(replica: StoreProcess, stores: DraftStores) -> None:
    """Return when a snapshot has been taken of what was put before, and perhaps of one rollout more."""
    now = time.time()
    # Without a change there would be no new snapshot.
    assert await stores.put([make("marker")]) == 1

    async def is_saved() -> bool:
        return seconds_of((await replica.stats()).snapshot_at) > now

    await until(is_saved, "a snapshot is taken")


async def test_history_comes_back_after_a_crash(deployment: Deployment) -> None:
    replica = await deployment.replica(0, "--snapshot-interval-seconds=0.05")
    stores = await deployment.client()
    assert await stores.put([*HISTORY, *DRAFTS]) == 100
    before = (await stores.fetch("run", PROMPTS)).rollouts
    await saved(replica, stores)
    await replica.restart(kill=True)
    assert "snapshot_restored" in replica.log()
    assert seconds_of((await replica.stats()).snapshot_at) > 0
    stores = await deployment.client()
    found = (await stores.fetch("run", PROMPTS)).rollouts
    assert list(map(describe, found)) == list(map(describe, before))


async def test_one_that_is_told_to_stop_saves_everything(deployment: Deployment) -> None:
    replica = await deployment.replica(0, NEVER)
    stores = await deployment.client()
    await stores.put(HISTORY)
    assert seconds_of((await replica.stats()).snapshot_at) == 0
    await replica.restart(kill=False)
    stats = await replica.stats()
    assert stats.rollouts == len(HISTORY)
    assert seconds_of(stats.snapshot_at) > 0


async def test_without_a_folder_a_restart_begins_empty(deployment: Deployment) -> None:
    replica = await deployment.replica(snapshots=False)
    stores = await deployment.client()
    await stores.put(HISTORY)
    await replica.restart(kill=False)
    assert (await replica.stats()).rollouts == 0


async def test_a_damaged_snapshot_is_refused_and_the_store_begins_empty(deployment: Deployment) -> None:
    replica = await deployment.replica(0, NEVER)
    stores = await deployment.client()
    await stores.put(HISTORY)
    await asyncio.to_thread(replica.child.stop, 20)
    file = deployment.folder / "snapshots" / "drafts-0.drafts"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0x10
    file.write_bytes(content)
    await replica.start()
    assert "snapshot_refused" in replica.log()
    stats = await replica.stats()
    assert (stats.rollouts, seconds_of(stats.snapshot_at)) == (0, 0)
    assert file.with_name("drafts-0.drafts.refused").read_bytes() == content
    stores = await deployment.client()
    assert await stores.put(HISTORY) == len(HISTORY), "it takes new ones"


async def test_a_smaller_budget_restores_what_fits(deployment: Deployment) -> None:
    replica = await deployment.replica(0, NEVER)
    stores = await deployment.client()
    rollouts = [make(f"p{number}", length=20_000) for number in range(20)]
    await stores.put(rollouts)
    await stores.fetch("run", ["p0"])
    await asyncio.to_thread(replica.child.stop, 20)
    smaller = await deployment.replica(0, NEVER, f"--budget-bytes={1 << 20}")
    stats = await smaller.stats()
    assert 0 < stats.bytes <= 1 << 20
    stores = await deployment.client()
    kept = {each.prompt_id for each in (await stores.fetch("run", PROMPTS)).rollouts}
    assert kept == {"p0", *(f"p{number}" for number in range(20 - stats.prompts + 1, 20))}


async def test_it_serves_while_a_snapshot_is_written(deployment: Deployment) -> None:
    replica = await deployment.replica(0, "--snapshot-interval-seconds=0.01")
    stores = await deployment.client()
    for number in range(30):
        assert await stores.put([make(f"q{number}", slot, length=4096) for slot in range(16)]) == 16
        assert len((await stores.fetch("run", [f"q{number}"])).rollouts) == 16
    await saved(replica, stores)
    assert (await replica.stats()).rollouts == 481
