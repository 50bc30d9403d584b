"""Starts a replica of the draft store: `python -m services.drafts --replica-id drafts-0 --redis-url URL`."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from prometheus_client import REGISTRY

from paceline.internal.v1 import draft_pb2_grpc as rpc
from services.drafts.archive import Archive
from services.drafts.client import SERVICE
from services.drafts.config import DraftsConfig
from services.drafts.metrics import DraftMetrics
from services.drafts.service import DraftService
from services.drafts.store import DraftStore
from services.gateway.tasks import end
from services.platform.process import Shutdown, run
from services.platform.registry import InstanceRecord, Registration
from services.platform.server import GrpcServer
from services.platform.store import OUTAGES, Keys, connect


async def serve(config: DraftsConfig, shutdown: Shutdown) -> None:
    """Restores the snapshot, then serves until told to stop or until another process has the replica's id."""
    store = DraftStore(config.budget_bytes, config.history_versions)
    archive = Archive(config.snapshot_path, store)
    await asyncio.to_thread(archive.restore)
    metrics = DraftMetrics(REGISTRY, store, lambda: archive.taken_at)
    server = GrpcServer(config, service="drafts")
    rpc.add_DraftServiceServicer_to_server(DraftService(store, archive, metrics), server.server)
    await server.start()
    async with connect(config) as redis:
        registration = Registration(redis, Keys(config.namespace), _record(config, server, shutdown))
        await registration.register()
        await server.set_serving(True)
        shutdown.ready(server.address)
        saving = archive.run(config.snapshot_interval_seconds, shutdown.requested, metrics)
        try:
            await _until_over(registration, asyncio.create_task(saving))
        finally:
            await server.set_serving(False)
            with suppress(*OUTAGES):
                await registration.deregister()
            await server.stop(config.shutdown_grace_seconds)
    await archive.take(metrics)


async def _until_over(registration: Registration, saving: asyncio.Task[None]) -> None:
    """Returns when `saving` has ended, at the request to stop. Raises why this process may not go on."""
    beating = asyncio.create_task(registration.run())
    try:
        await asyncio.wait((beating, saving), return_when=asyncio.FIRST_COMPLETED)
    finally:
        await end([task for task in (beating, saving) if not task.done()])
    for task in (beating, saving):
        if not task.cancelled():
            task.result()


def _record(config: DraftsConfig, server: GrpcServer, shutdown: Shutdown) -> InstanceRecord:
    metrics_address = f"{server.address.rpartition(':')[0]}:{shutdown.metrics_port}"
    return InstanceRecord(
        service=SERVICE,
        instance_id=config.replica_id,
        address=server.address,
        metrics_address=metrics_address,
        state="serving",
    )


if __name__ == "__main__":
    run("drafts", serve, DraftsConfig)
