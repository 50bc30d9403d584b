"""Bubble coordinator that decides nothing: it records reports, and answers what the test sets."""

from __future__ import annotations

import asyncio

import grpc

from paceline.internal.v1 import bubble_pb2 as pb
from paceline.internal.v1 import bubble_pb2_grpc as rpc
from services.contracts.errors import ServiceError
from services.platform.config import ServiceConfig
from services.platform.grpc.server import GrpcServer
from services.platform.redis.connection import Keys, connect
from services.platform.redis.registry import InstanceRecord, Registration
from services.platform.tasks import end


class CoordinatorDouble(rpc.BubbleServiceServicer):
    """Usage: `async with CoordinatorDouble(...) as double`; `kill` ends it as a killed process ends."""

    def __init__(self, redis_url: str, namespace: str, name: str = "bubbles-0") -> None:
        self.config = ServiceConfig(redis_url=redis_url, namespace=namespace)
        # What was told, in order, and the hints that are here.
        self.told: list[pb.SetRunRequest] = []
        self.hints: dict[str, pb.PutHintRequest] = {}
        self.coverage: list[pb.SlotCoverage] = []
        self.asked: list[pb.GetCoverageRequest] = []
        # Calls fail with this.
        self.error: ServiceError | None = None
        # Calls wait for it.
        self.gate = asyncio.Event()
        self.gate.set()
        self._name = name
        self._redis = connect(self.config)
        self._server = GrpcServer(self.config, service="bubbles")
        self._beating: asyncio.Task[None] | None = None

    async def __aenter__(self) -> CoordinatorDouble:
        rpc.add_BubbleServiceServicer_to_server(self, self._server.server)
        await self._server.start()
        record = InstanceRecord("bubbles", self._name, address=self._server.address)
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

    def run_report(self, run_id: str = "run") -> pb.SetRunRequest:
        """Return the last report of a run."""
        return next(
            (each for each in reversed(self.told) if each.run_id == run_id), pb.SetRunRequest(run_id=run_id)
        )

    def phases(self, run_id: str = "run") -> list[str]:
        """Return the phases of a run, each as often as it was entered."""
        found: list[str] = []
        for each in self.told:
            name = pb.RunPhase.Name(each.phase).removeprefix("RUN_PHASE_")
            if each.run_id == run_id and not each.closed and found[-1:] != [name]:
                found.append(name)
        return found

    async def SetRun(self, request: pb.SetRunRequest, context: grpc.aio.ServicerContext) -> pb.SetRunResponse:
        await self._answers()
        self.told.append(request)
        missing = [each for each in request.hint_ids if each not in self.hints]
        return pb.SetRunResponse(missing_hint_ids=missing)

    async def PutHint(
        self, request: pb.PutHintRequest, context: grpc.aio.ServicerContext
    ) -> pb.PutHintResponse:
        await self._answers()
        self.hints[request.hint_id] = request
        return pb.PutHintResponse(samples=sum(len(group.seeds) for group in request.groups))

    async def GetCoverage(
        self, request: pb.GetCoverageRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetCoverageResponse:
        self.asked.append(request)
        await self._answers()
        return pb.GetCoverageResponse(slots=self.coverage)

    async def _answers(self) -> None:
        await self.gate.wait()
        if self.error is not None:
            raise self.error
