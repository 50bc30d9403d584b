"""Servicer of GenerationService, and the state of the instance that it serves.

`GenerationInstance` pauses, drains and describes the instance, and has the terms on which it takes samples. The
servicer translates between the protocol and the parts of the instance.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import grpc

from paceline.internal.v1 import generation_pb2 as pb
from paceline.internal.v1 import generation_pb2_grpc as rpc
from paceline.times import duration, seconds_of
from paceline.v1 import fleet_pb2, weight_pb2
from services.contracts.errors import Unimplemented
from services.generation.config import GenerationConfig
from services.generation.loop.engine_loop import EngineLoop
from services.generation.loop.engine_thread import WorkKind
from services.generation.loop.work_items import AdmissionTerms
from services.generation.loop.work_stream import CheckpointRules, WorkStream
from services.generation.server.sample_intake import SampleIntake
from services.generation.server.weight_updates import WeightUpdates
from services.platform.redis.registry import InstanceRecord, Registration

_EVACUATION_POLL_SECONDS = 0.02
_STATES = {
    "serving": fleet_pb2.INSTANCE_STATE_SERVING,
    "paused": fleet_pb2.INSTANCE_STATE_PAUSED,
    "draining": fleet_pb2.INSTANCE_STATE_DRAINING,
}
# Fields of the record that its public form has unchanged.
_DESCRIBED = (
    *("instance_id", "epoch", "address", "policy_version", "max_running"),
    *("max_model_len", "vocab_size", "model", "device", "metrics_address", "refused_features"),
    "keeps_kv",
)

Context = grpc.aio.ServicerContext[Any, Any]
# Part of a caller's deadline that is left for handing samples back.
_DRAIN_ANSWER_SECONDS = 1.0


class GenerationInstance:
    """Pauses, drains and describes one instance. Its methods run in the event loop."""

    def __init__(
        self,
        config: GenerationConfig,
        loop: EngineLoop,
        registration: Registration,
        has_reallocator: Callable[[], Awaitable[bool]],
    ) -> None:
        """`has_reallocator` returns True if a reallocator could move samples away. The engine is ready."""
        self.evacuation_seconds = config.evacuation_seconds
        """Longest time to wait for samples to be moved away."""
        self._limits_of_work = {
            WorkKind.STEP: config.step_timeout_seconds,
            WorkKind.COMMAND: config.command_timeout_seconds,
        }
        self._loop = loop
        engine = loop.ready.result()
        self._limits, self._lenient_drafts = engine.limits, config.lenient_drafts
        self._registration = registration
        self._has_reallocator = has_reallocator
        self._draining = False

    @property
    def state(self) -> str:
        """serving, paused or draining."""
        if self._draining:
            return "draining"
        return "paused" if self._loop.paused else "serving"

    @property
    def hung(self) -> bool:
        """True if the engine thread works on one step or command for longer than it may take."""
        work = self._loop.work
        return work is not None and self._loop.now - work.since > self._limits_of_work[work.kind]

    def terms(self) -> AdmissionTerms:
        """Return the terms on which samples are taken now."""
        closed = "it is draining" if self._draining else ""
        return AdmissionTerms(self._loop.policy_version, self._limits, closed, self._lenient_drafts)

    async def pause(self, paused: bool) -> None:
        """Stop stepping, or resume; resuming also cancels a drain, for an instance that is to stay after all."""
        if not paused:
            self._draining = False

        def set_paused() -> None:
            self._loop.paused = paused

        await self._loop.execute(set_paused)

    async def evacuate(self, seconds: float) -> None:
        """Take no more samples; return once the instance is empty, after `seconds` at the latest.

        Return at once without a reallocator, because only moves of samples are worth waiting for.
        """
        self._draining = True
        loop = self._loop
        await loop.execute(loop.end_background)
        if seconds > 0 and loop.samples.real_count and await self._has_reallocator():
            deadline = time.monotonic() + seconds
            while (  # noqa: ASYNC110 (the engine thread sets no event)
                self._draining and loop.samples.real_count and not loop.paused and time.monotonic() < deadline
            ):
                await asyncio.sleep(_EVACUATION_POLL_SECONDS)

    async def drain(self, seconds: float = 0.0) -> int:
        """Evacuate the instance for `seconds`, then hand back the other samples with the tokens that they have.

        Return the number of samples handed back.
        """
        await self.evacuate(seconds)
        if not self._draining:
            # It was resumed meanwhile.
            return 0
        return await self._loop.execute(self._loop.abort_all)

    def load_values(self) -> dict[str, Any]:
        """Return the load as the registry stores it: plain numbers, times in seconds."""
        load = self._loop.load
        return {
            "running": load.running,
            "waiting": load.waiting,
            "kv_usage": load.kv_usage,
            "step_seconds": seconds_of(load.step_time),
            "generated_tokens": load.generated_tokens,
            "steps": load.steps,
        }

    def status(self) -> dict[str, Any]:
        """Return the fields of the record that change while the instance serves."""
        return {"state": self.state, "policy_version": self._loop.policy_version, "load": self.load_values()}

    def record(self) -> InstanceRecord:
        """Return the instance's current entry in the registry."""
        return replace(self._registration.record, **self.status())

    def describe(self) -> fleet_pb2.Instance:
        """Return the public form of the record."""
        record = self.record()
        described = fleet_pb2.Instance(
            state=_STATES[record.state],
            load=self._loop.load,
            **{name: getattr(record, name) for name in _DESCRIBED},
        )
        described.registered_at.FromNanoseconds(int(record.registered_at * 1e9))
        return described


class GenerationService(rpc.GenerationServiceServicer):
    """Servicer of one instance, called by its gateway."""

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
        """Take samples and send their tokens until the caller or the engine ends."""
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
        """Return the present state of the instance."""
        staged = self._weights.staged
        return pb.GetStatusResponse(
            instance=self._instance.describe(),
            staged_policy_version=0 if staged is None else staged.version,
            staged_checksum="" if staged is None else staged.checksum,
        )

    async def PauseEngine(self, request: pb.PauseEngineRequest, context: Context) -> pb.PauseEngineResponse:
        """Stop stepping; samples stay in the engine."""
        await self._instance.pause(True)
        return pb.PauseEngineResponse()

    async def ResumeEngine(
        self, request: pb.ResumeEngineRequest, context: Context
    ) -> pb.ResumeEngineResponse:
        """Resume stepping."""
        await self._instance.pause(False)
        return pb.ResumeEngineResponse()

    async def DrainEngine(self, request: pb.DrainEngineRequest, context: Context) -> pb.DrainEngineResponse:
        """Refuse new samples, let the running ones be moved away, and hand back the rest."""
        left = context.time_remaining()
        most = self._instance.evacuation_seconds if left is None else left - _DRAIN_ANSWER_SECONDS
        seconds = min(most, self._instance.evacuation_seconds)
        return pb.DrainEngineResponse(handed_over=await self._instance.drain(seconds))

    async def StageWeights(
        self, request: pb.StageWeightsRequest, context: Context
    ) -> pb.StageWeightsResponse:
        """Read and check weights while the engine runs."""
        if request.target == weight_pb2.WEIGHT_TARGET_DRAFTER:
            raise Unimplemented("drafter weights", "a drafter is loaded by LoadDraftModel")
        began = time.monotonic()
        field = request.WhichOneof("source") or "disk"
        staged = await self._weights.sources[field](request.policy_version, getattr(request, field))
        return pb.StageWeightsResponse(
            checksum=staged.checksum, stage_time=duration(time.monotonic() - began)
        )

    async def ApplyWeights(
        self, request: pb.ApplyWeightsRequest, context: Context
    ) -> pb.ApplyWeightsResponse:
        """Put staged weights into the engine, between two steps."""
        began = time.monotonic()
        keep_kv = request.in_flight == weight_pb2.IN_FLIGHT_KEEP_KV
        in_flight = keep_kv or request.in_flight == weight_pb2.IN_FLIGHT_CONTINUE
        applied = await self._weights.apply(request.policy_version, in_flight=in_flight, keep_kv=keep_kv)
        return pb.ApplyWeightsResponse(
            apply_time=duration(time.monotonic() - began),
            dropped_blocks=applied.dropped_blocks,
            halt_time=duration(applied.halt_seconds),
            continued_samples=applied.continued,
            kept_samples=applied.kept,
        )

    async def DiscardWeights(
        self, request: pb.DiscardWeightsRequest, context: Context
    ) -> pb.DiscardWeightsResponse:
        """Forget staged weights."""
        await self._weights.discard(request.policy_version)
        return pb.DiscardWeightsResponse()
