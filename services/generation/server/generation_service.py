"""Servicer of GenerationService: translates between the protocol and the parts of the instance."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import structlog

from paceline.internal.v1 import generation_pb2 as pb
from paceline.internal.v1 import generation_pb2_grpc as rpc
from paceline.times import duration
from paceline.v1 import weight_pb2
from services.contracts.errors import Unimplemented
from services.generation.loop.checkpoints import CheckpointRules
from services.generation.loop.work_stream import WorkStream
from services.generation.server.instance import GenerationInstance
from services.generation.server.sample_intake import SampleIntake
from services.generation.server.weight_updates import WeightUpdates
from services.generation.weights.expansion import GivenWeights

Context = grpc.aio.ServicerContext[Any, Any]
_log = structlog.get_logger(__name__)
# Of a caller's deadline, what is left for handing samples back.
_DRAIN_ANSWER_SECONDS = 1.0


class GenerationService(rpc.GenerationServiceServicer):
    """One instance, as its gateway sees it."""

    def __init__(
        self,
        instance: GenerationInstance,
        intake: SampleIntake,
        weights: WeightUpdates,
        checkpoints: CheckpointRules | None = None,
    ) -> None:
        """Serve an instance; `checkpoints` says when samples that are not streamed report."""
        self._instance = instance
        self._intake = intake
        self._weights = weights
        self._checkpoints = checkpoints

    async def Work(
        self, request_iterator: AsyncIterator[pb.WorkRequest], context: Context
    ) -> AsyncIterator[pb.WorkResponse]:
        """Take samples in and send tokens out until the caller or the engine ends."""
        stream = WorkStream(asyncio.get_running_loop(), self._checkpoints)
        opened = self._intake.open(stream)
        reader = asyncio.create_task(self._read(stream, request_iterator))
        try:
            await opened
            while (event := await stream.outbox.get()) is not None:
                if isinstance(event, Exception):
                    raise event
                yield event
        finally:
            reader.cancel()
            with suppress(asyncio.CancelledError, grpc.RpcError):
                await reader
            self._intake.close(stream)

    async def _read(self, stream: WorkStream, requests: AsyncIterator[pb.WorkRequest]) -> None:
        try:
            async for request in requests:
                self._intake.take(stream, request)
        finally:
            stream.put(None)

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:
        """Return the instance as it is now."""
        staged = self._weights.staged
        return pb.GetStatusResponse(
            instance=self._instance.describe(),
            staged_policy_version=0 if staged is None else staged.version,
            staged_checksum="" if staged is None else staged.checksum,
        )

    async def PauseEngine(self, request: pb.PauseEngineRequest, context: Context) -> pb.PauseEngineResponse:
        """Stop stepping; samples stay as they are."""
        await self._instance.pause(True)
        return pb.PauseEngineResponse()

    async def ResumeEngine(
        self, request: pb.ResumeEngineRequest, context: Context
    ) -> pb.ResumeEngineResponse:
        """Go on stepping."""
        await self._instance.pause(False)
        return pb.ResumeEngineResponse()

    async def DrainEngine(self, request: pb.DrainEngineRequest, context: Context) -> pb.DrainEngineResponse:
        """Refuse new samples from now on, let them be moved away, and hand back those that were not."""
        left = context.time_remaining()
        most = self._instance.evacuation_seconds if left is None else left - _DRAIN_ANSWER_SECONDS
        seconds = min(most, self._instance.evacuation_seconds)
        return pb.DrainEngineResponse(handed_over=await self._instance.drain(seconds))

    async def StageWeights(
        self, request: pb.StageWeightsRequest, context: Context
    ) -> pb.StageWeightsResponse:
        """Read and check weights beside the running engine."""
        if request.target == weight_pb2.WEIGHT_TARGET_DRAFTER:
            raise Unimplemented("drafter weights", "a drafter is put in by LoadDraftModel")
        began = time.monotonic()
        if request.WhichOneof("source") == "peers":
            staged = await self._weights.receive(request.policy_version, request.peers)
        else:
            staged = await self._weights.stage(request.policy_version, _given(request.disk))
        return pb.StageWeightsResponse(
            checksum=staged.checksum, stage_time=duration(time.monotonic() - began)
        )

    async def ApplyWeights(
        self, request: pb.ApplyWeightsRequest, context: Context
    ) -> pb.ApplyWeightsResponse:
        """Put staged weights into the engine, between two steps."""
        began = time.monotonic()
        goes_on = request.in_flight == weight_pb2.IN_FLIGHT_CONTINUE
        applied = await self._weights.apply(request.policy_version, goes_on=goes_on)
        return pb.ApplyWeightsResponse(
            apply_time=duration(time.monotonic() - began),
            dropped_blocks=applied.dropped_blocks,
            halt_time=duration(applied.halt_seconds),
            continued_samples=applied.continued,
        )

    async def DiscardWeights(
        self, request: pb.DiscardWeightsRequest, context: Context
    ) -> pb.DiscardWeightsResponse:
        """Forget staged weights."""
        await self._weights.discard(request.policy_version)
        return pb.DiscardWeightsResponse()


def _given(disk: weight_pb2.DiskWeights) -> GivenWeights:
    """Return weights that are on disk; an empty path is one that check_weight_folder refuses."""
    if not disk.delta:
        return GivenWeights(Path(disk.path), disk.checksum)
    return GivenWeights(Path(disk.path) if disk.path else None, disk.checksum, Path(disk.delta))
