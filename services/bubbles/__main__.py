"""Starts the bubble coordinator: `python -m services.bubbles --redis-url URL`."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from prometheus_client import REGISTRY

from paceline.internal.v1 import bubble_pb2_grpc as rpc
from services.bubbles import fleet
from services.bubbles.config import BubblesConfig
from services.bubbles.metrics import BubbleMetrics
from services.bubbles.service import BubbleService
from services.gateway.tasks import end
from services.platform.process import Shutdown, run
from services.platform.registry import InstanceRecord, Registration, Registry
from services.platform.server import GrpcServer
from services.platform.store import OUTAGES, Keys, connect


async def serve(config: BubblesConfig, shutdown: Shutdown) -> None:
    """Serves until told to stop, or until another process has registered under the same name."""
    service = BubbleService(config, BubbleMetrics(REGISTRY))
    server = GrpcServer(config, service="bubbles")
    rpc.add_BubbleServiceServicer_to_server(service, server.server)
    await server.start()
    async with connect(config) as redis:
        keys = Keys(config.namespace)
        registration = Registration(redis, keys, _record(config, server, shutdown))
        await registration.register()
        await server.set_serving(True)
        shutdown.ready(server.address)
        tasks = [
            asyncio.create_task(registration.run(), name="heartbeat"),
            asyncio.create_task(service.run(), name="expiry"),
            asyncio.create_task(fleet.watch(Registry(redis, keys), service.ledger.living), name="fleet"),
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


def _record(config: BubblesConfig, server: GrpcServer, shutdown: Shutdown) -> InstanceRecord:
    return InstanceRecord(
        service="bubbles",
        instance_id=config.instance_id,
        address=server.address,
        metrics_address=f"{server.address.rpartition(':')[0]}:{shutdown.metrics_port}",
        state="serving",
    )


if __name__ == "__main__":
    run("bubbles", serve, BubblesConfig)
