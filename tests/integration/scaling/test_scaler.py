"""Scaling with a real gateway: its queue makes the pool grow, and it evacuates what goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from services.platform.config import ServiceConfig
from services.platform.redis.decision_log import DecisionRecord
from services.platform.tasks import end
from services.policy.config import PoolConfig, ScalingConfig
from services.policy.scaling.scaler import Scaler
from tests.integration.gateway.conftest import Cluster, RunningGateway, check_samples, make_batch, until
from tests.support.kubernetes_api import NAMESPACE, KubernetesApi


@pytest.fixture
async def cluster(redis_url: str, namespace: str) -> AsyncIterator[Cluster]:
    cluster = Cluster(redis_url, namespace)
    yield cluster
    await cluster.close()


@pytest.fixture
async def api() -> AsyncIterator[KubernetesApi]:
    async with KubernetesApi() as api:
        api.make_stateful_set("pool", 2)
        yield api


class Scaling:
    """A scaler that is quick to decide."""

    def __init__(self, gateway: RunningGateway, api: KubernetesApi | None, **settings: Any) -> None:
        self.registry = CollectorRegistry()
        self.decisions: list[DecisionRecord] = []
        quick = {"interval_seconds": 0.05, "up_seconds": 0, "down_seconds": 0.2, "cooldown_seconds": 0}
        cluster = {"apply": True, "kubernetes_url": api.url, "kubernetes_namespace": NAMESPACE} if api else {}
        config = ScalingConfig(
            pools=[PoolConfig(name="pool", minimum=1, maximum=3)],
            gateway=gateway.gateway.address,
            # Nobody else wants it, and it outlasts any stall.
            lease_seconds=30.0,
            **{**quick, **cluster, **settings},
        )
        self.scaler = Scaler(ServiceConfig(), config, self.registry, self._tell)

    async def _tell(self, decision: DecisionRecord) -> None:
        self.decisions.append(decision)

    def metric(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"paceline_scaling_{name}", labels)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.Task[None]]:
        task = asyncio.create_task(self.scaler.run())
        try:
            yield task
        finally:
            await end([task])


async def pool_of(cluster: Cluster, count: int, **settings: Any) -> tuple[RunningGateway, list[Any]]:
    gateway = await cluster.gateway()
    instances = [await cluster.instance(f"pool-{n}", **settings) for n in range(count)]
    await cluster.serving(gateway, count)
    return gateway, instances


async def test_a_queue_makes_the_pool_grow(cluster: Cluster, api: KubernetesApi) -> None:
    gateway, instances = await pool_of(cluster, 2, max_running=4)
    for instance in instances:
        instance.hold_at = 5
    request = make_batch(groups=6, samples=4, ignore_eos=True)
    await gateway.trainer.submit(request)
    scaling = Scaling(gateway, api)
    async with scaling.running():
        await until(lambda: api.replicas["pool"] == 3, "the pool grows")
        assert scaling.metric("recommended_replicas", pool="pool") == 3
        for instance in instances:
            instance.hold_at = None
        check_samples(request, await gateway.trainer.collect(request))
    assert scaling.decisions[0].kind == "scaling"
    assert "2 to 3 instances, since" in scaling.decisions[0].reason
    assert "samples wait" in scaling.decisions[0].reason


async def test_what_stands_idle_goes_after_its_samples_have_moved(
    cluster: Cluster, api: KubernetesApi
) -> None:
    gateway, instances = await pool_of(cluster, 2)
    for instance in instances:
        instance.hold_at = 5
    request = make_batch(groups=2, samples=4, ignore_eos=True)
    await gateway.trainer.submit(request)
    await until(lambda: all(each.running() for each in instances), "both work")
    scaling = Scaling(gateway, api, idle_seconds=0.001)
    scaling.scaler._meter.idle_for = lambda now: 1e9  # type: ignore[method-assign]
    async with scaling.running():
        await until(lambda: api.replicas["pool"] == 1, "the pool shrinks")
        assert instances[1].draining
        assert not instances[1].running(), "evacuated before it was removed"
        assert not instances[0].draining
        await until(lambda: len(instances[0].running()) == 8, "all samples are on the other one")
        instances[0].hold_at = None
        check_samples(request, await gateway.trainer.collect(request))
    assert api.scaled == [("pool", 1)]


async def test_several_go_one_after_the_other_without_a_pause(cluster: Cluster, api: KubernetesApi) -> None:
    gateway, instances = await pool_of(cluster, 3)
    api.scale_by_hand("pool", 3)
    scaling = Scaling(gateway, api, cooldown_seconds=3600)
    scaling.scaler._meter.idle_for = lambda now: 1e9  # type: ignore[method-assign]
    resumed = []
    for instance in instances:
        instance.ResumeEngine = lambda *_, name=instance.instance_id: resumed.append(name)
    async with scaling.running():
        await until(lambda: api.replicas["pool"] == 1, "two are gone")
    assert api.scaled == [("pool", 2), ("pool", 1)]
    assert [each.draining for each in instances] == [False, True, True]
    assert not resumed
    assert [decision.reason for decision in scaling.decisions] == [
        "pool: 3 to 1 instances, since there has been no work for long"
    ]


async def test_work_that_comes_in_an_evacuation_keeps_the_instance(
    cluster: Cluster, api: KubernetesApi
) -> None:
    gateway, instances = await pool_of(cluster, 2, max_running=4)
    for instance in instances:
        instance.hold_at, instance.evacuation_seconds = 5, 60.0
    await gateway.trainer.submit(make_batch(groups=2, samples=4, ignore_eos=True))
    await until(lambda: all(each.running() for each in instances), "both work")
    scaling = Scaling(gateway, api)
    idle = [1e9]
    scaling.scaler._meter.idle_for = lambda now: idle[0]  # type: ignore[method-assign]
    async with scaling.running():
        await until(lambda: instances[1].draining, "the second is evacuated")
        await gateway.trainer.submit(make_batch(groups=4, samples=4, ignore_eos=True))
        idle[0] = 0.0
        await until(lambda: not instances[1].draining, "it is taken back")
        await until(lambda: "pool-1" in gateway.links(), "it is given work again")
        await until(lambda: api.replicas["pool"] == 3, "and one more is wanted")
    assert 1 not in [replicas for _, replicas in api.scaled]


async def test_without_leave_it_only_recommends(cluster: Cluster) -> None:
    gateway, instances = await pool_of(cluster, 2, max_running=4)
    instances[0].hold_at = instances[1].hold_at = 5
    await gateway.trainer.submit(make_batch(groups=6, samples=4, ignore_eos=True))
    scaling = Scaling(gateway, None)
    async with scaling.running():
        await until(lambda: scaling.metric("wanted_replicas", pool="pool") == 3, "it recommends")
    assert scaling.metric("replicas", pool="pool") is None


async def test_a_gateway_that_is_away_changes_nothing(cluster: Cluster, api: KubernetesApi) -> None:
    gateway, _ = await pool_of(cluster, 2)
    scaling = Scaling(gateway, api)
    async with scaling.running() as task:
        await until(lambda: scaling.metric("wanted_replicas", pool="pool") == 2, "it has looked")
        await gateway.kill()
        failed = {"call": "demand", "kind": "unreachable"}
        await until(lambda: (scaling.metric("errors_total", **failed) or 0) >= 2, "it says so")
        assert not task.done()
    assert api.scaled == []
