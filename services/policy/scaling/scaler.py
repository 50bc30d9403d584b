"""Observe the demand, recommend replicas, and apply the recommendation if configured.

A pool grows at once, and shrinks by one evacuated instance at a time. A StatefulSet removes its highest ordinal, so
that instance is drained first. The Lease notes which instance is being drained before the drain begins: a successor
finds the note, and continues or reverts the drain. Drains that others began are left alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
import structlog
from prometheus_client import CollectorRegistry

from paceline.internal.v1 import demand_pb2, demand_pb2_grpc
from paceline.times import seconds_of
from paceline.v1 import fleet_pb2, fleet_pb2_grpc
from services.platform.config import ServiceConfig
from services.platform.grpc.channel import open_channel
from services.platform.redis.decision_log import DecisionRecord
from services.platform.tasks import Notifier, end, until_one_ends
from services.policy.config import ScalingConfig
from services.policy.metrics import (
    ApiConflict,
    ClusterError,
    GatewayError,
    ScalingError,
    ScalingMetrics,
    UnknownInstance,
)
from services.policy.scaling.recommendation import (
    Demand,
    Due,
    Meter,
    PoolCapacity,
    Recommendation,
    Stabilizer,
    ordinal,
    recommend,
)

if TYPE_CHECKING:
    from services.policy.scaling.kubernetes_client import Election, KubernetesClient, Scale

log = structlog.get_logger(__name__)

CALL_SECONDS = 5.0
"""Deadline of short calls."""

T = TypeVar("T")


class GatewayLink:
    """Connection to the gateway. Every call raises GatewayError if it fails."""

    def __init__(self, address: str, config: ServiceConfig) -> None:
        """Connect. ValueError if the token would travel to the gateway in plain text."""
        self._channel = open_channel(address, config)
        self._demand: Any = demand_pb2_grpc.DemandServiceStub(self._channel)
        self._fleet: Any = fleet_pb2_grpc.FleetServiceStub(self._channel)

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close()

    async def demand(self) -> Demand:
        """Return the present demand."""
        found = await _answer(self._demand.GetDemand(demand_pb2.GetDemandRequest(), timeout=CALL_SECONDS))
        return Demand(
            waiting_samples=found.waiting_samples,
            waiting_tokens=found.waiting_tokens,
            running_samples=found.running_samples,
            running_tokens=found.running_tokens,
            dues=tuple(Due(seconds_of(each.time_left), each.tokens_left) for each in found.batches),
            instances=tuple(found.instances),
        )

    async def drain(self, instance_id: str, seconds: float) -> int:
        """Evacuate an instance within `seconds`; return the number of samples that were handed over."""
        request = fleet_pb2.DrainRequest(instance_id=instance_id)
        return int((await _answer(self._fleet.Drain(request, timeout=seconds))).handed_over)

    async def resume(self, instance_id: str) -> None:
        """Let a drained instance take samples again."""
        request = fleet_pb2.ResumeRequest(instance_ids=[instance_id])
        await _answer(self._fleet.Resume(request, timeout=CALL_SECONDS))


async def _answer(call: Awaitable[T]) -> T:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        kind = UnknownInstance if error.code() is grpc.StatusCode.NOT_FOUND else GatewayError
        raise kind(f"{error.code().name}: {error.details()}") from error


NOTE = "paceline.io/draining-"
"""Prefix of the annotation of the Lease that names the instance of a pool that is being drained."""


class PoolScaler:
    """Scaler of one pool. `run` it until cancelled; `want` sets the wanted replicas."""

    def __init__(
        self,
        pool: str,
        cluster: KubernetesClient,
        gateway: GatewayLink,
        election: Election,
        metrics: ScalingMetrics,
        scaling: ScalingConfig,
    ) -> None:
        self.replicas: int | None = None
        """Desired replicas of the StatefulSet, as read last; None before."""
        self._pool = pool
        self._note = NOTE + pool
        self._cluster = cluster
        self._gateway = gateway
        self._election = election
        self._metrics = metrics
        self._drain_seconds = scaling.drain_seconds
        self._retry_seconds = scaling.interval_seconds
        self._wanted: int | None = None
        self._changed = Notifier()

    def want(self, replicas: int) -> None:
        """Set the wanted replicas."""
        if replicas != self._wanted:
            self._wanted = replicas
            self._changed.notify()

    async def run(self) -> None:
        """Scale to the wanted replicas until cancelled; failures are retried."""
        while True:
            changed = self._changed.next_change()
            await self.follow()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._retry_seconds):
                    await changed.wait()

    async def follow(self) -> None:
        """Make one attempt, with every evacuation that it needs. Failures are counted and logged, not raised."""
        try:
            scale: Scale | None = await self._read()
            while scale is not None and self._election.leading:
                scale = await self._step(scale)
            self._metrics.succeeded(f"scale {self._pool}")
        except ClusterError as error:
            self._metrics.failed(f"scale {self._pool}", error)
        except GatewayError as error:
            self._metrics.failed(f"evacuate {self._pool}", error)

    async def _step(self, scale: Scale) -> Scale | None:
        """Make one change and return the scale after it; None if there is nothing to change."""
        wanted = scale.replicas if self._wanted is None else self._wanted
        await self._revert_drain(scale.replicas, wanted)
        if wanted > scale.replicas:
            return await self._write(wanted, scale, "up")
        if wanted < scale.replicas:
            return await self._shrink(scale)
        return None

    async def _shrink(self, scale: Scale) -> Scale:
        victim = f"{self._pool}-{scale.replicas - 1}"
        await self._election.note(self._note, victim)
        log.info("evacuating", pool=self._pool, instance=victim)
        after = None
        try:
            with self._metrics.draining.labels(self._pool).track_inprogress():
                if await self._evacuate(victim, scale.replicas):
                    after = await self._remove(scale, victim)
        except ScalingError:
            await self._keep(victim, "failed")
            raise
        if after is None:
            await self._keep(victim, "cancelled")
            return await self._read()
        await self._election.note(self._note, None)
        return after

    async def _remove(self, scale: Scale, victim: str) -> Scale | None:
        """Remove the evacuated instance; return None if it no longer has the highest number."""
        while True:
            try:
                return await self._write(scale.replicas - 1, scale, "down")
            except ApiConflict as error:
                self._metrics.failed(f"scale {self._pool}", error)
                fresh = await self._read()
                if fresh.replicas != scale.replicas:
                    log.info("scaled_by_another", pool=self._pool, replicas=fresh.replicas, instance=victim)
                    return None
                scale = fresh

    async def _evacuate(self, victim: str, replicas: int) -> bool:
        """Drain an instance; return False if it is wanted again, or this controller may no longer act."""

        def may_remove() -> bool:
            return self._election.leading and self._wanted is not None and self._wanted < replicas

        draining = asyncio.create_task(self._drain(victim), name=f"drain-{victim}")
        try:
            while not draining.done():
                changed = asyncio.create_task(self._changed.next_change().wait())
                # With a timeout, because the loss of the Lease causes no notification.
                await asyncio.wait((draining, changed), timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
                await end([changed])
                if not may_remove():
                    return False
            draining.result()
            return may_remove()
        finally:
            await end([draining])

    async def _drain(self, victim: str) -> None:
        try:
            handed_over = await self._gateway.drain(victim, self._drain_seconds)
        except UnknownInstance:
            # A pod that never came up has no samples. A ready one may, and the gateway has yet to find it.
            if await self._cluster.pod_is_ready(victim):
                raise
            handed_over = 0
        log.info("evacuated", pool=self._pool, instance=victim, samples=handed_over)

    async def _keep(self, victim: str, change: str) -> None:
        self._metrics.changes.labels(self._pool, change).inc()
        log.info("evacuation_ended", pool=self._pool, instance=victim, reason=change)
        await self._resume(victim)

    async def _revert_drain(self, replicas: int, wanted: int) -> None:
        """Resume an instance that is to stay, if an earlier attempt or a former leader was draining it."""
        victim = self._election.notes.get(self._note, "")
        number = ordinal(victim, self._pool)
        if number is None:
            return
        if number >= replicas:
            await self._election.note(self._note, None)
        elif wanted >= replicas or number < replicas - 1:
            await self._resume(victim)

    async def _resume(self, victim: str) -> None:
        """Let an instance take samples again. If that fails, its note stays, so that it is retried."""
        try:
            # An unknown instance is gone, or will serve once it registers.
            with suppress(UnknownInstance):
                await self._gateway.resume(victim)
            await self._election.note(self._note, None)
        except ScalingError as error:
            self._metrics.failed(f"resume {self._pool}", error)

    async def _read(self) -> Scale:
        return self._observe(await self._cluster.scale(self._pool))

    async def _write(self, replicas: int, scale: Scale, change: str) -> Scale:
        after = await self._cluster.set_scale(self._pool, replicas, scale.version)
        self._metrics.changes.labels(self._pool, change).inc()
        log.info("scaled", pool=self._pool, before=scale.replicas, after=replicas)
        return self._observe(after)

    def _observe(self, scale: Scale) -> Scale:
        self.replicas = scale.replicas
        self._metrics.replicas.labels(self._pool).set(scale.replicas)
        return scale


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
