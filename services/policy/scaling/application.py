"""Makes a StatefulSet have the replicas that are wanted: up at once, down one evacuated instance at a time.

A StatefulSet removes its highest ordinal, so that is the instance that is drained first. Who is being drained is
noted in the Lease before the drain begins: a successor finds it there, and goes on with it or takes it back. An
instance that somebody else drains is left alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

import structlog

from services.platform.tasks import end
from services.policy.scaling.cluster import Scale
from services.policy.scaling.demand import ordinal
from services.policy.scaling.errors import ApiConflict, ClusterError
from services.policy.scaling.gateway import GatewayError, UnknownInstance
from services.policy.scaling.metrics import ScalingMetrics

log = structlog.get_logger(__name__)

NOTE = "paceline.io/draining-"
"""Begins the name of the note in the Lease that says which instance of a pool is being drained."""


class Replicas(Protocol):
    """Of the cluster: see `cluster.Cluster`."""

    async def scale(self, pool: str) -> Scale: ...

    async def set_scale(self, pool: str, replicas: int, version: str) -> Scale: ...

    async def pod_is_ready(self, name: str) -> bool: ...


class Evacuation(Protocol):
    """Of the gateway: see `gateway.GatewayLink`."""

    async def drain(self, instance_id: str, seconds: float) -> int: ...

    async def resume(self, instance_id: str) -> None: ...


class Leadership(Protocol):
    """See `election.Election`."""

    @property
    def leading(self) -> bool: ...

    @property
    def notes(self) -> dict[str, str]: ...

    async def note(self, key: str, value: str | None) -> None: ...


class PoolScaler:
    """One pool. `run` until cancelled; `want` says how many replicas there should be."""

    def __init__(
        self,
        pool: str,
        cluster: Replicas,
        fleet: Evacuation,
        leadership: Leadership,
        metrics: ScalingMetrics,
        *,
        drain_seconds: float,
        retry_seconds: float,
    ) -> None:
        self.pool = pool
        self.replicas: int | None = None
        """What the StatefulSet is meant to have, as last read; None before."""
        self._cluster = cluster
        self._fleet = fleet
        self._leadership = leadership
        self._metrics = metrics
        self._drain_seconds = drain_seconds
        self._retry_seconds = retry_seconds
        self._wanted: int | None = None
        self._changed = asyncio.Event()

    def want(self, replicas: int) -> None:
        """From now on there should be so many."""
        if replicas != self._wanted:
            self._wanted = replicas
            self._changed.set()

    async def run(self) -> None:
        """Follows what is wanted; what fails is tried again."""
        while True:
            self._changed.clear()
            await self.follow()
            try:
                async with asyncio.timeout(self._retry_seconds):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def follow(self) -> None:
        """One attempt, with as many evacuations as it takes. Failures are counted and logged, not raised."""
        try:
            scale = await self._read()
            while self._leadership.leading and (following := await self._step(scale)) is not None:
                scale = following
            self._metrics.succeeded(f"scale {self.pool}")
        except ClusterError as error:
            self._metrics.failed(f"scale {self.pool}", error)
        except GatewayError as error:
            self._metrics.failed(f"evacuate {self.pool}", str(error))

    async def _step(self, scale: Scale) -> Scale | None:
        """The scale after a change; None when there is nothing to change."""
        wanted = scale.replicas if self._wanted is None else self._wanted
        await self._take_back(scale.replicas, wanted)
        if wanted > scale.replicas:
            return await self._write(wanted, scale, "up")
        if wanted < scale.replicas:
            return await self._shrink(scale)
        return None

    async def _shrink(self, scale: Scale) -> Scale | None:
        victim = f"{self.pool}-{scale.replicas - 1}"
        await self._leadership.note(NOTE + self.pool, victim)
        log.info("evacuating", pool=self.pool, instance=victim)
        self._metrics.draining.labels(self.pool).set(1)
        try:
            if not await self._evacuated(victim, scale.replicas):
                await self._keep(victim, "cancelled")
                return None
            after = await self._lower(scale, victim)
        except (ClusterError, GatewayError):
            await self._keep(victim, "failed")
            raise
        finally:
            self._metrics.draining.labels(self.pool).set(0)
        if after is None:
            await self._keep(victim, "cancelled")
            return await self._read()
        await self._leadership.note(NOTE + self.pool, None)
        return after

    async def _lower(self, scale: Scale, victim: str) -> Scale | None:
        """Removes the evacuated victim; None when it is not the highest any more."""
        while True:
            try:
                return await self._write(scale.replicas - 1, scale, "down")
            except ApiConflict as error:
                self._metrics.failed(f"scale {self.pool}", error)
                fresh = await self._read()
                if fresh.replicas != scale.replicas:
                    log.info("scaled_by_another", pool=self.pool, replicas=fresh.replicas, instance=victim)
                    return None
                scale = fresh

    async def _evacuated(self, victim: str, replicas: int) -> bool:
        """Drains it; False when it is wanted again, or when this controller may not act any more."""
        draining = asyncio.create_task(self._drain(victim), name=f"drain-{victim}")
        try:
            while not draining.done():
                self._changed.clear()
                waiting = asyncio.create_task(self._changed.wait())
                # Looked at now and then, since nobody says when the lease is lost.
                await asyncio.wait((draining, waiting), timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
                await end([waiting])
                if not self._may_remove(replicas):
                    return False
            draining.result()
            return self._may_remove(replicas)
        finally:
            await end([draining])

    def _may_remove(self, replicas: int) -> bool:
        return self._leadership.leading and self._wanted is not None and self._wanted < replicas

    async def _drain(self, victim: str) -> None:
        try:
            handed_over = await self._fleet.drain(victim, self._drain_seconds)
        except UnknownInstance:
            # A pod that never came up holds nothing. One that is ready does, and the gateway has yet to find it.
            if await self._cluster.pod_is_ready(victim):
                raise
            handed_over = 0
        log.info("evacuated", pool=self.pool, instance=victim, samples=handed_over)

    async def _keep(self, victim: str, change: str) -> None:
        """The instance stays: it is to take work again."""
        self._metrics.changes.labels(self.pool, change).inc()
        log.info("evacuation_ended", pool=self.pool, instance=victim, why=change)
        await self._resume(victim)

    async def _take_back(self, replicas: int, wanted: int) -> None:
        """Resumes an instance that is to stay and that an earlier attempt, or a former leader, was draining."""
        victim = self._leadership.notes.get(NOTE + self.pool)
        number = None if victim is None else ordinal(victim, self.pool)
        if victim is None or number is None:
            return
        if number >= replicas:
            await self._leadership.note(NOTE + self.pool, None)
        elif wanted >= replicas or number < replicas - 1:
            await self._resume(victim)

    async def _resume(self, victim: str) -> None:
        try:
            await self._fleet.resume(victim)
        except UnknownInstance:
            pass  # it is gone, or will register as one that serves
        except GatewayError as error:
            # The note stays, so that it is tried again.
            self._metrics.failed(f"resume {self.pool}", str(error))
            return
        await _quietly(lambda: self._leadership.note(NOTE + self.pool, None))

    async def _read(self) -> Scale:
        return self._note(await self._cluster.scale(self.pool))

    async def _write(self, replicas: int, scale: Scale, change: str) -> Scale:
        after = await self._cluster.set_scale(self.pool, replicas, scale.version)
        self._metrics.changes.labels(self.pool, change).inc()
        log.info("scaled", pool=self.pool, before=scale.replicas, after=replicas)
        return self._note(after)

    def _note(self, scale: Scale) -> Scale:
        self.replicas = scale.replicas
        self._metrics.replicas.labels(self.pool).set(scale.replicas)
        return scale


async def _quietly(write: Callable[[], Awaitable[None]]) -> None:
    try:
        await write()
    except ClusterError as error:
        log.warning("note_not_written", error=str(error))
