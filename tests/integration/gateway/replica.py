"""A replica of the draft store in this process: the real service over a real socket, and its end."""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry

from paceline.internal.v1 import draft_pb2_grpc as rpc
from services.contracts.rollout import StoredRollout
from services.drafts.client import SERVICE
from services.drafts.service import Archive, DraftService, DraftStoreMetrics
from services.drafts.store import DraftStore
from services.platform.config import ServiceConfig
from services.platform.grpc.server import GrpcServer
from services.platform.redis.connection import Keys, connect
from services.platform.redis.registry import InstanceRecord, Registration
from services.platform.tasks import end


class Replica:
    """Usage: `async with Replica(...) as replica`; `kill` ends it as a killed process ends."""

    def __init__(self, redis_url: str, namespace: str, replica_id: str = "drafts-0") -> None:
        self.config = ServiceConfig(redis_url=redis_url, namespace=namespace)
        self.store = DraftStore(1 << 30)
        self._id = replica_id
        self._redis = connect(self.config)
        self._server = GrpcServer(self.config, service="drafts")
        self._beating: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Replica:
        metrics = DraftStoreMetrics(CollectorRegistry(), self.store, lambda: 0.0)
        service = DraftService(self.store, Archive(None, self.store), metrics)
        rpc.add_DraftServiceServicer_to_server(service, self._server.server)
        await self._server.start()
        record = InstanceRecord(SERVICE, self._id, address=self._server.address)
        registration = Registration(self._redis, Keys(self.config.namespace), record)
        await registration.register()
        self._beating = asyncio.create_task(registration.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    async def kill(self) -> None:
        """Its socket closes and its heartbeat ends; the record stays until it expires."""
        if self._beating is not None:
            await end([self._beating])
            self._beating = None
            await self._server.stop(0)
            await self._redis.aclose()

    def rollouts(self) -> dict[tuple[str, int, int], StoredRollout]:
        """What is stored, by prompt, slot and version."""
        return {(each.prompt_id, each.slot, each.version): each for each in self.store}
