"""DraftModelService of an instance without an engine, for tests of who calls it.

It keeps the contract: a checkpoint whose SHA-256 is not as said is refused and what is in use stays; a head
in use is not loaded again; what became of drafts counts from the swap on. A test says how drafts fare with
`draft`.
"""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any, Self

import grpc

from paceline.errors import Violation
from paceline.internal.v1 import drafter_pb2 as pb
from paceline.internal.v1 import drafter_pb2_grpc as rpc
from services.contracts.errors import InvalidArgument
from services.platform.config import ServiceConfig
from services.platform.grpc.server import GrpcServer
from services.platform.redis.connection import Keys, connect
from services.platform.redis.registry import InstanceRecord, Registration
from services.platform.tasks import end


class FakeDraftModel(rpc.DraftModelServiceServicer):
    """`loaded` are the versions that it took, in order. `deaf`: it does not answer. `refuses`: it takes nothing."""

    def __init__(self, config: ServiceConfig, instance_id: str) -> None:
        self.instance_id = instance_id
        self.loaded: list[int] = []
        self.deaf = self.refuses = False
        self.status = pb.GetDraftModelResponse()
        self.registration: Registration | None = None
        self._config = config
        self._redis = connect(config)
        self._server = GrpcServer(config, service="generation")
        self._beating: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        rpc.add_DraftModelServiceServicer_to_server(self, self._server.server)
        await self._server.start()
        record = InstanceRecord("generation", self.instance_id, address=self._server.address, state="serving")
        # Well within its expiry, even if this process is held up for two seconds.
        self.registration = Registration(self._redis, Keys(self._config.namespace), record, interval=0.25)
        await self.registration.register()
        self._beating = asyncio.create_task(self.registration.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._beating is not None:
            await end([self._beating])
        await self._server.stop(0)
        await self._redis.aclose()

    @property
    def version(self) -> int:
        """In use."""
        return self.status.drafter_version

    def draft(self, drafts: int, length: int, accepted: int) -> None:
        """So many drafts of so many tokens each were verified, and so many tokens accepted in all."""
        self.status.drafts += drafts
        self.status.draft_tokens += drafts * length
        self.status.accepted_tokens += accepted

    async def LoadDraftModel(
        self, request: pb.LoadDraftModelRequest, context: Any
    ) -> pb.LoadDraftModelResponse:
        if self.deaf:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "deaf")
        before = self.version
        if (request.drafter_version, request.sha256) == (before, self.status.sha256):
            return pb.LoadDraftModelResponse(previous_drafter_version=before)
        content = (Path(request.path) / "model.safetensors").read_bytes()
        if self.refuses or hashlib.sha256(content).hexdigest() != request.sha256:
            raise InvalidArgument([Violation("path", "is broken")])
        self.status = pb.GetDraftModelResponse(drafter_version=request.drafter_version, sha256=request.sha256)
        self.loaded.append(request.drafter_version)
        return pb.LoadDraftModelResponse(previous_drafter_version=before)

    async def GetDraftModel(self, request: pb.GetDraftModelRequest, context: Any) -> pb.GetDraftModelResponse:
        if self.deaf:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "deaf")
        return self.status
