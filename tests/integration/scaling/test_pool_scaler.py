"""Replicas follow what is wanted, and nobody is removed who has not been evacuated."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from services.platform.tasks import end
from services.policy.config import ScalingConfig
from services.policy.metrics import GatewayError, ScalingMetrics, UnknownInstance
from services.policy.scaling.kubernetes_client import Election, KubernetesClient, connected
from services.policy.scaling.scaler import NOTE, GatewayLink, PoolScaler
from tests.support.kubernetes_api import NAMESPACE, KubernetesApi

LEASE, LEASE_SECONDS = "scaling", 10.0


class Fleet(GatewayLink):
    """A gateway that drains when the test lets it, and keeps a book of what it was told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.draining: set[str] = set()
        self.error: Exception | None = None
        self.free = asyncio.Event()
        self.entered = asyncio.Event()

    async def drain(self, instance_id: str, seconds: float) -> int:
        self.told.append(f"drain {instance_id}")
        if self.error is not None:
            raise self.error
        self.draining.add(instance_id)
        self.entered.set()
        await self.free.wait()
        self.told.append(f"empty {instance_id}")
        return 3

    async def resume(self, instance_id: str) -> None:
        self.told.append(f"resume {instance_id}")
        self.draining.discard(instance_id)


class Rig:
    """A pool of three on a fake API, and a controller that leads."""

    def __init__(self, api: KubernetesApi, cluster: KubernetesClient) -> None:
        self.api = api
        self.cluster = cluster
        self.fleet = Fleet()
        self.registry = CollectorRegistry()
        self.metrics = ScalingMetrics(self.registry)
        self.ahead = 0.0
        """Seconds by which the clock of the election is put forward: the Lease is over when the test says so."""
        self.election = Election(cluster, LEASE, "me", LEASE_SECONDS, self.metrics, self._now)
        self.pool = self.controller()

    def _now(self) -> float:
        return asyncio.get_running_loop().time() + self.ahead

    def controller(self) -> PoolScaler:
        return PoolScaler(
            "pool",
            self.cluster,
            self.fleet,
            self.election,
            self.metrics,
            ScalingConfig(drain_seconds=60, interval_seconds=0.05),
        )

    @property
    def replicas(self) -> int:
        return self.api.replicas["pool"]

    def count(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"paceline_scaling_{name}", labels) or 0.0

    async def until(self, holds: Callable[[], Any]) -> None:
        async with asyncio.timeout(60):
            while not holds():  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with KubernetesApi() as api, connected(api.url, NAMESPACE) as cluster:
        api.make_stateful_set("pool", 3)
        rig = Rig(api, cluster)
        async with running(rig.election.run()):
            await rig.until(lambda: rig.election.leading)
            yield rig


@asynccontextmanager
async def running(work: Awaitable[None]) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.ensure_future(work)
    try:
        yield task
    finally:
        await end([task])


async def test_more_replicas_are_there_at_once(rig: Rig) -> None:
    rig.pool.want(6)
    await rig.pool.follow()
    assert rig.replicas == 6
    assert rig.fleet.told == []
    assert rig.count("changes_total", pool="pool", change="up") == 1
    assert rig.count("replicas", pool="pool") == 6


async def test_nothing_is_done_before_anything_is_wanted(rig: Rig) -> None:
    await rig.pool.follow()
    assert (rig.replicas, rig.pool.replicas, rig.api.scaled) == (3, 3, [])


async def test_replicas_go_one_by_one_from_the_top_and_empty(rig: Rig) -> None:
    rig.pool.want(1)
    following = asyncio.create_task(rig.pool.follow())
    await rig.fleet.entered.wait()
    assert rig.replicas == 3, "still evacuating"
    assert rig.count("draining", pool="pool") == 1
    assert rig.api.leases[LEASE]["metadata"]["annotations"] == {f"{NOTE}pool": "pool-2"}
    rig.fleet.free.set()
    await following
    assert rig.fleet.told == ["drain pool-2", "empty pool-2", "drain pool-1", "empty pool-1"]
    assert rig.api.scaled == [("pool", 2), ("pool", 1)]
    assert rig.count("draining", pool="pool") == 0
    assert not rig.election.notes


async def test_a_drain_that_is_not_wanted_any_more_is_taken_back(rig: Rig) -> None:
    rig.pool.want(2)
    following = asyncio.create_task(rig.pool.follow())
    await rig.fleet.entered.wait()
    rig.pool.want(3)
    await following
    assert rig.fleet.told == ["drain pool-2", "resume pool-2"]
    assert (rig.replicas, rig.api.scaled, rig.fleet.draining) == (3, [], set())
    assert rig.count("changes_total", pool="pool", change="cancelled") == 1
    assert not rig.election.notes


async def test_a_drain_that_fails_keeps_the_instance_and_is_tried_again(rig: Rig) -> None:
    rig.fleet.error = GatewayError("UNAVAILABLE: gone")
    rig.pool.want(2)
    async with running(rig.pool.run()):
        await rig.until(lambda: rig.fleet.told.count("drain pool-2") >= 2)
        assert rig.replicas == 3
        assert rig.count("errors_total", call="evacuate pool", kind="unreachable") >= 1
        rig.fleet.error = None
        rig.fleet.free.set()
        await rig.until(lambda: rig.replicas == 2)
    assert rig.fleet.told[:2] == ["drain pool-2", "resume pool-2"]


async def test_a_pod_that_never_came_up_is_removed_and_one_that_is_ready_is_not(rig: Rig) -> None:
    rig.fleet.error = UnknownInstance("NOT_FOUND: instance 'pool-2' not found")
    rig.pool.want(2)
    await rig.pool.follow()
    assert rig.replicas == 3, "it is ready: the gateway is to find it first"
    rig.api.unready.add("pool-2")
    await rig.pool.follow()
    assert rig.replicas == 2


async def test_a_conflict_is_read_again_and_overcome(rig: Rig) -> None:
    rig.fleet.free.set()
    rig.api.interference = lambda: rig.api.scale_by_hand("pool", 3)
    rig.pool.want(2)
    await rig.pool.follow()
    assert rig.replicas == 2
    assert rig.fleet.told == ["drain pool-2", "empty pool-2"], "drained once"
    assert rig.count("errors_total", call="scale pool", kind="conflict") == 1


async def test_somebody_who_scales_up_meanwhile_saves_the_instance(rig: Rig) -> None:
    rig.fleet.free.set()
    rig.api.interference = lambda: rig.api.scale_by_hand("pool", 4)
    rig.pool.want(3)
    rig.api.scale_by_hand("pool", 4)
    rig.api.interference = lambda: rig.api.scale_by_hand("pool", 5)
    await rig.pool.follow()
    # pool-3 was empty already, but it is not the highest any more: pool-4 goes, and then it.
    assert rig.fleet.told[:5] == [
        "drain pool-3",
        "empty pool-3",
        "resume pool-3",
        "drain pool-4",
        "empty pool-4",
    ]
    assert rig.replicas == 3


@pytest.mark.parametrize(("status", "kind"), [(403, "forbidden"), (500, "unreachable"), (429, "unreachable")])
async def test_what_the_api_refuses_is_told_and_tried_again(rig: Rig, status: int, kind: str) -> None:
    rig.fleet.free.set()
    rig.api.faults[("PUT", "scale")] = status
    rig.pool.want(2)
    await rig.pool.follow()
    assert rig.replicas == 3
    assert rig.count("errors_total", call="scale pool", kind=kind) == 1
    assert rig.fleet.told[-1] == "resume pool-2", "what could not be removed works on"
    rig.api.faults.clear()
    await rig.pool.follow()
    assert rig.replicas == 2


async def test_an_api_that_is_gone_is_outlasted(rig: Rig) -> None:
    rig.pool.want(4)
    await rig.api.shut()
    await rig.pool.follow()
    assert rig.count("errors_total", call="scale pool", kind="unreachable") == 1


async def test_who_does_not_lead_changes_nothing(rig: Rig) -> None:
    rig.api.faults[("PUT", "lease")] = 403
    await rig.until(lambda: rig.count("errors_total", call="lease", kind="forbidden") >= 1)
    rig.ahead = LEASE_SECONDS
    assert not rig.election.leading
    for replicas in (5, 1):
        rig.pool.want(replicas)
        await rig.pool.follow()
    assert (rig.api.scaled, rig.fleet.told) == ([], [])
    assert rig.count("leader") == 0


async def test_who_loses_the_lease_in_a_drain_takes_it_back(rig: Rig) -> None:
    rig.pool.want(2)
    following = asyncio.create_task(rig.pool.follow())
    await rig.fleet.entered.wait()
    rig.api.faults[("PUT", "lease")] = 500
    rig.ahead = LEASE_SECONDS
    await following
    assert rig.fleet.told == ["drain pool-2", "resume pool-2"]
    assert rig.replicas == 3


async def test_a_successor_takes_back_what_a_dead_leader_was_draining(rig: Rig) -> None:
    rig.pool.want(2)
    async with running(rig.pool.run()) as task:
        await rig.fleet.entered.wait()
        # As if the process died: nothing of it is cleaned up.
        note = dict(rig.api.leases[LEASE]["metadata"]["annotations"])
        task.cancel()
        await asyncio.wait([task])
    rig.fleet.told.clear()
    await rig.election.note(f"{NOTE}pool", note[f"{NOTE}pool"])
    successor = rig.controller()
    successor.want(3)
    await successor.follow()
    assert rig.fleet.told == ["resume pool-2"]
    assert not rig.election.notes


async def test_a_drain_by_somebody_else_is_left_alone(rig: Rig) -> None:
    rig.fleet.draining.add("pool-1")
    rig.pool.want(3)
    await rig.pool.follow()
    rig.pool.want(4)
    await rig.pool.follow()
    assert rig.fleet.told == []
