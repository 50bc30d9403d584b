"""Scale a StatefulSet to the wanted replicas: grow at once, shrink by one evacuated instance at a time.

A StatefulSet removes its highest ordinal, so that instance is drained first. The Lease notes which instance is
being drained before the drain begins: a successor finds the note, and continues or reverts the drain. Drains that
others began are left alone.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import structlog

from services.platform.tasks import Notifier, end
from services.policy.config import ScalingConfig
from services.policy.scaling.gateway import GatewayError, GatewayLink, UnknownInstance
from services.policy.scaling.kubernetes_client import (
    ApiConflict,
    ClusterError,
    Election,
    KubernetesClient,
    Scale,
)
from services.policy.scaling.metrics import ScalingError, ScalingMetrics
from services.policy.scaling.recommendation import ordinal

log = structlog.get_logger(__name__)

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
