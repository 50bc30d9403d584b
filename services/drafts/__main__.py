"""Start a replica of the draft store: `python -m services.drafts --replica-id drafts-0 --redis-url URL`."""

from __future__ import annotations

import asyncio
from functools import partial

from prometheus_client import REGISTRY

from paceline.internal.v1 import draft_pb2_grpc as rpc
from services.drafts.client import SERVICE
from services.drafts.config import DraftsConfig
from services.drafts.service import Archive, DraftService, DraftStoreMetrics
from services.drafts.store import DraftStore
from services.platform.service import RegisteredServer, Shutdown, run


async def main(config: DraftsConfig, shutdown: Shutdown) -> None:
    """Restore the snapshot, then serve until asked to stop or superseded by another process of the replica's id."""
    store = DraftStore(config.budget_bytes, config.history_versions)
    archive = Archive(config.snapshot_path, store)
    await asyncio.to_thread(archive.restore)
    metrics = DraftStoreMetrics(REGISTRY, store, lambda: archive.taken_at)
    server = RegisteredServer(config, SERVICE, config.replica_id, metrics_port=shutdown.metrics_port)
    rpc.add_DraftServiceServicer_to_server(DraftService(store, archive, metrics), server.server.server)
    # It ends by itself when the service is asked to stop, once the snapshot in progress is complete.
    saving = partial(archive.run, config.snapshot_interval_seconds, shutdown.requested, metrics)
    server.work.append(saving)
    await server.start()
    shutdown.ready(server.address)
    try:
        await server.run()
    finally:
        await server.stop(config.shutdown_grace_seconds)
    await archive.take(metrics)


if __name__ == "__main__":
    run("drafts", main, DraftsConfig)
