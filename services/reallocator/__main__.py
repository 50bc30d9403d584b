"""Starts the reallocator: `python -m services.reallocator --redis-url URL`."""

from __future__ import annotations

import asyncio
import uuid
from contextlib import suppress

import structlog
from prometheus_client import REGISTRY
from redis.asyncio import Redis

from services.gateway.tasks import end
from services.platform.decisions import DecisionLog
from services.platform.lease import Lease
from services.platform.process import Shutdown, run
from services.platform.registry import InstanceRecord, Registration, Registry
from services.platform.server import GrpcServer
from services.platform.store import OUTAGES, Keys, connect
from services.reallocator.config import ReallocatorConfig
from services.reallocator.learned import Costs, Learned
from services.reallocator.metrics import ReallocatorMetrics
from services.reallocator.models import Rooflines
from services.reallocator.reallocator import Reallocator

log = structlog.get_logger(__name__)


async def serve(config: ReallocatorConfig, shutdown: Shutdown) -> None:
    """Works until told to stop, or until another process has registered under the same name."""
    rooflines, metrics = Rooflines(config), ReallocatorMetrics(REGISTRY)
    learned = Learned(Costs(config.ways()))
    server = GrpcServer(config, service="reallocator")
    await server.start()
    async with connect(config) as redis:
        registration = Registration(redis, Keys(config.namespace), _record(config, server, shutdown))
        await registration.register()
        await server.set_serving(True)
        shutdown.ready(server.address)
        tasks = [
            asyncio.create_task(registration.run(), name="heartbeat"),
            asyncio.create_task(_lead(config, redis, rooflines, metrics, learned), name="lead"),
            asyncio.create_task(shutdown.wait(), name="shutdown"),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await end(tasks)
            await server.set_serving(False)
            with suppress(*OUTAGES):
                await registration.deregister()
            await server.stop(config.shutdown_grace_seconds)


async def _lead(
    config: ReallocatorConfig,
    redis: Redis,
    rooflines: Rooflines,
    metrics: ReallocatorMetrics,
    learned: Learned,
) -> None:
    """Decides whenever it has the lease."""
    key = f"{config.namespace}:{{reallocator}}:lease"
    while True:
        lease = Lease(redis, key, uuid.uuid4().hex, config.lease_seconds)
        registry, decisions = Registry(redis, Keys(config.namespace)), DecisionLog(redis, config.namespace)
        try:
            await lease.acquire()
            log.info("leading")
            metrics.leader.set(1)
            reallocator = Reallocator(config, registry, decisions, metrics, rooflines, learned)
            holding = asyncio.create_task(lease.hold(), name="lease")
            working = asyncio.create_task(reallocator.run(), name="reallocator")
            try:
                await asyncio.wait((holding, working), return_when=asyncio.FIRST_COMPLETED)
                if holding.done():
                    log.warning("lease_lost", to=holding.result())
                else:
                    working.result()
            finally:
                await end((working, holding))
        finally:
            metrics.leader.set(0)
            await lease.release()


def _record(config: ReallocatorConfig, server: GrpcServer, shutdown: Shutdown) -> InstanceRecord:
    return InstanceRecord(
        service="reallocator",
        instance_id=config.instance_id,
        address=server.address,
        metrics_address=f"{server.address.rpartition(':')[0]}:{shutdown.metrics_port}",
        state="serving",
    )


if __name__ == "__main__":
    run("reallocator", serve, ReallocatorConfig)
