"""Looks at the demand, recommends, and has the recommendation followed where that is configured."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from importlib import import_module

import structlog
from prometheus_client import CollectorRegistry

from services.platform.config import ServiceConfig
from services.platform.decisions import Decision
from services.platform.tasks import until_one_ends
from services.policy.scaling.config import ScalingConfig
from services.policy.scaling.demand import Demand, State, ordinal
from services.policy.scaling.gateway import GatewayError, GatewayLink
from services.policy.scaling.meter import Meter
from services.policy.scaling.metrics import ScalingMetrics
from services.policy.scaling.recommendation import Fleet, Recommendation, recommend
from services.policy.scaling.steadiness import Steady

log = structlog.get_logger(__name__)

Tell = Callable[[Decision], Awaitable[object]]

_CAPACITY = 128.0
"""Samples that an instance runs at once, where none has said yet: the default of the instance."""


class Scaler:
    """One process's part in scaling: every process recommends, the one with the Lease acts. `run` until cancelled.

    `tell` is given every change of mind as a decision.
    """

    def __init__(
        self, config: ServiceConfig, scaling: ScalingConfig, registry: CollectorRegistry, tell: Tell
    ) -> None:
        self._config = config
        self._scaling = scaling
        self._metrics = ScalingMetrics(registry)
        self._tell = tell
        self._rules = scaling.rules()
        self._names = {pool.name: None for pool in scaling.pools}
        self._meter = Meter()
        self._steady = {name: Steady(scaling.patience()) for name in self._names}
        self._wanted: dict[str, int] = {}

    async def run(self) -> None:
        """Works until cancelled; outlasts gateway and Kubernetes. ClusterError when it is to apply what it
        recommends and no cluster is configured."""
        async with AsyncExitStack() as stack:
            link = await stack.enter_async_context(GatewayLink(self._scaling.gateway, self._config))
            tasks: list[asyncio.Task[None]] = []
            read: dict[str, Callable[[], int | None]] = {}
            follow: dict[str, Callable[[int], None]] = {}
            if self._scaling.apply:
                # Only here, so that nobody needs the client of Kubernetes who does not scale; it takes seconds to
                # import, in which heartbeats have to go on.
                await asyncio.to_thread(import_module, "services.policy.scaling.cluster")
                from services.policy.scaling.application import PoolScaler
                from services.policy.scaling.cluster import connected
                from services.policy.scaling.election import Election

                scaling = self._scaling
                cluster = await stack.enter_async_context(
                    connected(
                        scaling.kubernetes_url, scaling.kubernetes_namespace, scaling.kubernetes_ca_file
                    )
                )
                election = Election(
                    cluster, scaling.lease_name, scaling.identity, scaling.lease_seconds, self._metrics
                )
                tasks.append(asyncio.create_task(election.run(), name="scaling-lease"))
                for name in self._names:
                    pool = PoolScaler(
                        name,
                        cluster,
                        link,
                        election,
                        self._metrics,
                        drain_seconds=scaling.drain_seconds,
                        retry_seconds=scaling.interval_seconds,
                    )
                    read[name], follow[name] = (lambda pool=pool: pool.replicas), pool.want  # type: ignore[misc]
                    tasks.append(asyncio.create_task(pool.run(), name=f"scale-{name}"))
            tasks.append(asyncio.create_task(self._watch(link, read, follow), name="demand"))
            await until_one_ends(tasks)

    async def _watch(
        self,
        link: GatewayLink,
        read: dict[str, Callable[[], int | None]],
        follow: dict[str, Callable[[int], None]],
    ) -> None:
        while True:
            try:
                demand = await link.demand()
                self._metrics.succeeded("demand")
            except GatewayError as error:
                # What was wanted stands: a gateway that is away is no reason to change anything.
                self._metrics.failed("demand", str(error))
            else:
                known = {name: get() for name, get in read.items()}
                for name, wanted in (await self.look(demand, known, time.monotonic())).items():
                    if name in follow and known[name] is not None:
                        follow[name](wanted)
            await asyncio.sleep(self._scaling.interval_seconds)

    async def look(self, demand: Demand, known: dict[str, int | None], now: float) -> dict[str, int]:
        """Takes in a look at the demand, and says how many replicas each pool should have now; `known` are those
        that the StatefulSets are meant to have."""
        self._meter.observe(demand, self._names, now)
        fleets = [self._fleet(name, demand, known.get(name)) for name in self._names]
        idle = self._meter.idle_for(now) >= self._scaling.idle_seconds
        found = recommend(self._rules, demand, fleets, self._meter.bubble_share, idle)
        wanted = {
            name: self._steady[name].next(fleet.replicas, found.replicas[name], now)
            for name, fleet in zip(self._names, fleets, strict=True)
        }
        self._show(found, wanted)
        for name, fleet in zip(self._names, fleets, strict=True):
            if wanted[name] != self._wanted.get(name, fleet.replicas):
                await self._tell(_decision(name, fleet.replicas, wanted[name], found, demand))
        self._wanted = wanted
        return wanted

    def _fleet(self, name: str, demand: Demand, known: int | None) -> Fleet:
        mine = [each for each in demand.instances if ordinal(each.instance_id, name) is not None]
        living = [each for each in mine if each.state is not State.DEAD]
        capacities = [each.capacity for each in living if each.capacity > 0]
        capacity = sum(capacities) / len(capacities) if capacities else _CAPACITY
        return Fleet(len(living) if known is None else known, self._meter.rate(name), capacity)

    def _show(self, found: Recommendation, wanted: dict[str, int]) -> None:
        for name in self._names:
            self._metrics.recommended.labels(name).set(found.replicas[name])
            self._metrics.wanted.labels(name).set(wanted[name])
            if (rate := self._meter.rate(name)) is not None:
                self._metrics.rate.labels(name).set(rate)
        if self._meter.bubble_share is not None:
            self._metrics.bubble_share.set(self._meter.bubble_share)


def _decision(pool: str, before: int, after: int, found: Recommendation, demand: Demand) -> Decision:
    words = {
        "queue": f"{demand.waiting_samples} samples wait",
        "deadline": "a deadline would be missed",
        "bubbles": "instances stand idle within steps",
        "idle": "there has been no work for long",
        "enough": "the need is over",
    }
    return Decision(
        "scaling",
        f"{pool}: {before} to {after} instances, since {words[found.reason]}",
        # More capacity is time saved; less saves machines, not time.
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
