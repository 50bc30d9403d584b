"""Observe the demand, recommend replicas, and apply the recommendation if configured."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from importlib import import_module
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry

from paceline.v1 import fleet_pb2
from services.platform.config import ServiceConfig
from services.platform.redis.decision_log import DecisionRecord
from services.platform.tasks import until_one_ends
from services.policy.config import ScalingConfig
from services.policy.scaling.gateway import GatewayError, GatewayLink
from services.policy.scaling.metrics import ScalingMetrics
from services.policy.scaling.recommendation import (
    Demand,
    Meter,
    PoolCapacity,
    Recommendation,
    Stabilizer,
    ordinal,
    recommend,
)

if TYPE_CHECKING:
    from services.policy.scaling.pool_scaler import PoolScaler

Explain = Callable[[DecisionRecord], Awaitable[object]]

_CAPACITY = 128.0
"""Samples that an instance runs at once while none has reported it: the default of the instance."""
_LOST = (fleet_pb2.INSTANCE_STATE_UNSPECIFIED, fleet_pb2.INSTANCE_STATE_DEAD)
"""States of instances that the gateway has lost."""
_REASONS = {
    "queue": "{waiting} samples wait",
    "deadline": "a deadline would be missed",
    "bubbles": "instances are idle within steps",
    "idle": "there has been no work for long",
    "enough": "the need is over",
}


class Scaler:
    """Control loop of one process: every process recommends, the holder of the Lease applies.

    `explain` receives a decision for every change of the wanted replicas.
    """

    def __init__(
        self, config: ServiceConfig, scaling: ScalingConfig, registry: CollectorRegistry, explain: Explain
    ) -> None:
        self._config = config
        self._scaling = scaling
        self._metrics = ScalingMetrics(registry)
        self._explain = explain
        self._meter = Meter()
        self._stabilizers = {pool.name: Stabilizer(scaling) for pool in scaling.pools}
        self._wanted: dict[str, int] = {}

    async def run(self) -> None:
        """Observe and scale until cancelled, also through outages of the gateway and of Kubernetes.

        ClusterError if recommendations are to be applied and no cluster is configured.
        """
        async with AsyncExitStack() as stack:
            link = GatewayLink(self._scaling.gateway, self._config)
            stack.push_async_callback(link.close)
            pools, work = await self._appliers(stack, link) if self._scaling.apply else ({}, [])
            await until_one_ends([asyncio.create_task(each) for each in (*work, self._observe(link, pools))])

    async def _appliers(
        self, stack: AsyncExitStack, link: GatewayLink
    ) -> tuple[dict[str, PoolScaler], list[Coroutine[Any, Any, None]]]:
        """Return the scalers, by pool, and the coroutines that have to run for them."""
        # Imported only here, because the client of Kubernetes is optional, and in a thread, because the import
        # takes seconds in which heartbeats must continue.
        await asyncio.to_thread(import_module, "services.policy.scaling.kubernetes_client")
        from services.policy.scaling.kubernetes_client import Election, connected
        from services.policy.scaling.pool_scaler import PoolScaler

        scaling, metrics = self._scaling, self._metrics
        cluster = await stack.enter_async_context(
            connected(scaling.kubernetes_url, scaling.kubernetes_namespace, scaling.kubernetes_ca_file)
        )
        election = Election(cluster, scaling.lease_name, scaling.identity, scaling.lease_seconds, metrics)
        pools = {
            name: PoolScaler(name, cluster, link, election, metrics, scaling) for name in self._stabilizers
        }
        return pools, [election.run(), *(pool.run() for pool in pools.values())]

    async def _observe(self, link: GatewayLink, pools: dict[str, PoolScaler]) -> None:
        while True:
            try:
                demand = await link.demand()
                self._metrics.succeeded("demand")
            except GatewayError as error:
                # While the gateway is unreachable, nothing changes.
                self._metrics.failed("demand", error)
            else:
                known = {name: pool.replicas for name, pool in pools.items()}
                wanted = await self._want(demand, known, time.monotonic())
                for name, pool in pools.items():
                    if known[name] is not None:
                        pool.want(wanted[name])
            await asyncio.sleep(self._scaling.interval_seconds)

    async def _want(self, demand: Demand, known: dict[str, int | None], now: float) -> dict[str, int]:
        """Return the wanted replicas of each pool; `known` has the desired replicas of the StatefulSets."""
        self._meter.observe(demand, self._stabilizers, now)
        capacities = {name: self._capacity(name, demand, known.get(name)) for name in self._stabilizers}
        idle = self._meter.idle_for(now) >= self._scaling.idle_seconds
        share = self._meter.bubble_share
        found = recommend(self._scaling, demand, list(capacities.values()), share, idle)
        wanted = {
            name: stabilizer.update(capacities[name].replicas, found.replicas[name], now)
            for name, stabilizer in self._stabilizers.items()
        }
        for name, capacity in capacities.items():
            self._metrics.recommended.labels(name).set(found.replicas[name])
            self._metrics.wanted.labels(name).set(wanted[name])
            if capacity.rate is not None:
                self._metrics.rate.labels(name).set(capacity.rate)
            if wanted[name] != self._wanted.get(name, capacity.replicas):
                await self._explain(_decision(name, capacity.replicas, wanted[name], found, demand))
        if share is not None:
            self._metrics.bubble_share.set(share)
        self._wanted = wanted
        return wanted

    def _capacity(self, name: str, demand: Demand, known: int | None) -> PoolCapacity:
        mine = [each for each in demand.instances if ordinal(each.instance_id, name) is not None]
        alive = [each for each in mine if each.state not in _LOST]
        reported = [each.max_running for each in alive if each.max_running > 0]
        capacity = sum(reported) / len(reported) if reported else _CAPACITY
        return PoolCapacity(len(alive) if known is None else known, self._meter.rate(name), capacity)


def _decision(pool: str, before: int, after: int, found: Recommendation, demand: Demand) -> DecisionRecord:
    reason = _REASONS[found.reason].format(waiting=demand.waiting_samples)
    return DecisionRecord(
        "scaling",
        f"{pool}: {before} to {after} instances, since {reason}",
        # More capacity saves time; less saves machines, not time.
        predicted_gain=max(0.0, after / before - 1.0) if before else 0.0,
        details={
            "pool": pool,
            "before": before,
            "after": after,
            "cause": found.reason,
            "wanted": round(min(found.wanted, 1e15), 3),
            "there": round(found.there, 3),
            "unit": found.unit,
            "waiting_samples": demand.waiting_samples,
            "unfinished_tokens": round(demand.tokens, 1),
        },
    )
