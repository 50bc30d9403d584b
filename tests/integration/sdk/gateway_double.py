"""A small gateway on real gRPC: answers from memory, and can be cut off and brought back on its port."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from paceline.times import duration
from paceline.v1 import (
    fleet_pb2,
    fleet_pb2_grpc,
    rollout_pb2,
    rollout_pb2_grpc,
    sample_pb2,
    weight_pb2,
    weight_pb2_grpc,
)
from tests.support.ports import free_port
from tests.support.token_columns import columns


@dataclass
class State:
    """What outlives a restart of the gateway, as Redis would hold it."""

    batches: dict[tuple[str, str], rollout_pb2.SubmitRolloutsRequest] = field(default_factory=dict)
    version: int = 4
    checksum: str = ""
    """Of the weights that are served; empty: they are those of the start."""
    update: weight_pb2.StartUpdateRequest | None = None
    disk: weight_pb2.DiskWeights | None = None
    reports: list[rollout_pb2.ReportRewardsRequest] = field(default_factory=list)
    calls: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    """Name and metadata of every call."""
    failures: dict[str, list[tuple[grpc.StatusCode, str, list[Message]] | None]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """Errors that the next calls of a method are answered with; None: the call succeeds."""
    acks: list[rollout_pb2.AckRolloutsRequest] = field(default_factory=list)
    hints: list[rollout_pb2.HintNextBatchRequest] = field(default_factory=list)
    hanging: set[str] = field(default_factory=set)
    """Methods that never answer."""
    hung: threading.Event = field(default_factory=threading.Event)
    """Set when a call has arrived that is never answered."""
    cut_after: int | None = None
    """The next stream ends without an error after so many events."""
    left: threading.Event = field(default_factory=threading.Event)
    """Set when a caller has left WatchFleet."""
    stall_after: int | None = None
    """Streams that begin now wait for `go_on` after so many events."""


def until(condition: Callable[[], object]) -> None:
    """Wait until the condition holds. AssertionError when it does not."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def samples_of(batch: rollout_pb2.SubmitRolloutsRequest) -> list[sample_pb2.Sample]:
    """One sample per slot; its tokens are a function of its name."""
    return [
        sample_pb2.Sample(
            prompt_id=group.prompt_id,
            slot=slot,
            tokens=columns([len(group.prompt_token_ids), slot, 7], [-0.5, -1.0, -0.25], batch.policy_version),
            finish_reason=sample_pb2.FINISH_REASON_STOP,
            status=sample_pb2.SAMPLE_STATUS_COMPLETED,
            seed=2**63 + slot,
        )
        for group in batch.groups
        for slot in range(group.samples)
    ]


async def fail(context: Any, code: grpc.StatusCode, message: str, details: list[Message]) -> None:
    """End a call as Paceline's services do."""
    packed = []
    for detail in details:
        packed.append(any_pb2.Any())
        packed[-1].Pack(detail)
    status = status_pb2.Status(code=code.value[0], message=message, details=packed)
    context.set_trailing_metadata(
        (("grpc-status-details-bin", status.SerializeToString()), ("x-request-id", "req-1"))
    )
    await context.abort(code, message)


class _Servicer:
    def __init__(self, state: State, go_on: asyncio.Event) -> None:
        self.state = state
        self.go_on = go_on

    async def enter(self, name: str, context: Any) -> None:
        self.state.calls.append((name, dict(context.invocation_metadata())))
        if name in self.state.hanging:
            self.state.hung.set()
            await asyncio.Event().wait()
        if self.state.failures[name] and (failure := self.state.failures[name].pop(0)) is not None:
            await fail(context, *failure)


class Rollouts(_Servicer, rollout_pb2_grpc.RolloutServiceServicer):
    """Batches are finished when they are submitted."""

    async def SubmitRollouts(self, request: Any, context: Any) -> Any:
        await self.enter("SubmitRollouts", context)
        key = (request.run_id, request.batch_id)
        known = key in self.state.batches
        if known and self.state.batches[key] != request:
            info = error_details_pb2.ErrorInfo(reason="ALREADY_EXISTS", domain="paceline")
            await fail(context, grpc.StatusCode.ALREADY_EXISTS, "another batch has this id", [info])
        self.state.batches[key] = request
        total = sum(group.samples for group in request.groups)
        return rollout_pb2.SubmitRolloutsResponse(
            batch_id=request.batch_id, samples=total, already_submitted=known
        )

    async def StreamRollouts(self, request: Any, context: Any) -> AsyncIterator[Any]:
        await self.enter("StreamRollouts", context)
        submitted = self.state.batches.get((request.run_id, request.batch_id))
        if submitted is None:
            await fail(context, grpc.StatusCode.NOT_FOUND, f"batch {request.batch_id!r} not found", [])
            return
        samples = samples_of(submitted)
        cut, self.state.cut_after = self.state.cut_after, None
        stall = self.state.stall_after
        # Starts one event too early: a client must not give an event twice.
        for cursor in range(max(1, request.cursor), len(samples) + 1):
            if cursor == cut:
                return
            if cursor == stall:
                if cursor == max(1, request.cursor):
                    yield rollout_pb2.StreamRolloutsResponse(cursor=request.cursor, total=len(samples))
                await self.go_on.wait()
            yield rollout_pb2.StreamRolloutsResponse(
                cursor=cursor, sample=samples[cursor - 1], finished=cursor, total=len(samples)
            )

    async def AckRollouts(self, request: Any, context: Any) -> Any:
        await self.enter("AckRollouts", context)
        self.state.acks.append(request)
        return rollout_pb2.AckRolloutsResponse(trimmed=request.cursor)

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        await self.enter("Generate", context)
        for token in (5, 6):
            delta = columns([token], [-1.0])
            yield rollout_pb2.GenerateResponse(delta=delta)
        await self.enter("Generate.middle", context)
        sample = sample_pb2.Sample(prompt_id=request.prompt_id, tokens=columns([5, 6], [-1.0, -1.0]))
        yield rollout_pb2.GenerateResponse(sample=sample)

    async def CancelRollouts(self, request: Any, context: Any) -> Any:
        await self.enter("CancelRollouts", context)
        return rollout_pb2.CancelRolloutsResponse(cancelled=len(request.samples) or 99)

    async def HintNextBatch(self, request: Any, context: Any) -> Any:
        await self.enter("HintNextBatch", context)
        self.state.hints.append(request)
        return rollout_pb2.HintNextBatchResponse(samples=sum(group.samples for group in request.groups))

    async def ReportRewards(self, request: Any, context: Any) -> Any:
        await self.enter("ReportRewards", context)
        self.state.reports.append(request)
        return rollout_pb2.ReportRewardsResponse(matched=len(request.rewards))


class Weights(_Servicer, weight_pb2_grpc.WeightServiceServicer):
    """Two instances that accept everything."""

    async def StartUpdate(self, request: Any, context: Any) -> Any:
        await self.enter("StartUpdate", context)
        self.state.update = request
        return weight_pb2.StartUpdateResponse(update_id="u1", policy_version=self.state.version)

    async def UpdateWeights(self, requests: AsyncIterator[Any], context: Any) -> Any:
        await self.enter("UpdateWeights", context)
        async for request in requests:
            self.state.disk = request.disk
        staged = [weight_pb2.InstanceUpdate(instance_id=f"i{n}", stage_time=duration(0.5)) for n in range(2)]
        return weight_pb2.UpdateWeightsResponse(instances=staged)

    async def FinishUpdate(self, request: Any, context: Any) -> Any:
        assert self.state.update is not None
        await self.enter("FinishUpdate", context)
        self.state.version, self.state.update = self.state.update.policy_version, None
        await self.enter("FinishUpdate.answer", context)
        return weight_pb2.FinishUpdateResponse(policy_version=self.state.version)

    async def AbortUpdate(self, request: Any, context: Any) -> Any:
        await self.enter("AbortUpdate", context)
        self.state.update = None
        return weight_pb2.AbortUpdateResponse(policy_version=self.state.version)

    async def GetVersions(self, request: Any, context: Any) -> Any:
        await self.enter("GetVersions", context)
        version, checksum = self.state.version, self.state.checksum
        return weight_pb2.GetVersionsResponse(
            policy_version=version, drafter_version=2, policy_checksum=checksum
        )


class Fleet(_Servicer, fleet_pb2_grpc.FleetServiceServicer):
    """One instance."""

    def _instance(self) -> Any:
        load = fleet_pb2.InstanceLoad(running=3, kv_usage=0.5)
        return fleet_pb2.Instance(
            instance_id="i0", epoch=2, state=fleet_pb2.INSTANCE_STATE_SERVING, load=load
        )

    async def ListInstances(self, request: Any, context: Any) -> Any:
        await self.enter("ListInstances", context)
        return fleet_pb2.ListInstancesResponse(instances=[self._instance()])

    async def WatchFleet(self, request: Any, context: Any) -> AsyncIterator[Any]:
        await self.enter("WatchFleet", context)
        try:
            yield fleet_pb2.WatchFleetResponse(instances=[self._instance()])
            await asyncio.Event().wait()
        finally:
            self.state.left.set()

    async def Pause(self, request: Any, context: Any) -> Any:
        await self.enter("Pause", context)
        return fleet_pb2.PauseResponse(instance_ids=request.instance_ids or ["i0"])

    async def Drain(self, request: Any, context: Any) -> Any:
        await self.enter("Drain", context)
        return fleet_pb2.DrainResponse(handed_over=5)

    async def GetKnobs(self, request: Any, context: Any) -> Any:
        await self.enter("GetKnobs", context)
        answer = fleet_pb2.GetKnobsResponse(revision=3)
        answer.knobs.draft_cap = 16
        return answer


class GatewayDouble:
    """Runs the server in a thread of its own."""

    def __init__(
        self,
        credentials: grpc.ServerCredentials | None = None,
        state: State | None = None,
        leads: bool = True,
    ) -> None:
        self.state = state or State()
        self.leads = leads
        self._port = free_port()
        self._credentials = credentials
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._server: Any = None
        self._go_on: asyncio.Event | None = None

    def __enter__(self) -> GatewayDouble:
        self._thread.start()
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    def start(self) -> None:
        """Serve, on the same port each time."""
        self._run(self._start)

    def stop(self) -> None:
        """Cuts every call off, as a crash does."""
        self._run(self._stop)

    def lead(self, leads: bool) -> None:
        """Gain or lose leadership: another gateway answers from now on."""
        self.leads = leads
        self._run(lambda: self._tell(leads))

    def go_on(self) -> None:
        """Lets stalled streams go on."""
        assert self._go_on is not None
        self._loop.call_soon_threadsafe(self._go_on.set)

    def names(self) -> list[str]:
        """Return the calls so far."""
        return [name for name, _ in self.state.calls if "." not in name]

    async def _start(self) -> None:
        self._go_on = asyncio.Event()
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        self._health = health.aio.HealthServicer()
        await self._tell(self.leads)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server(Rollouts(self.state, self._go_on), server)
        weight_pb2_grpc.add_WeightServiceServicer_to_server(Weights(self.state, self._go_on), server)
        fleet_pb2_grpc.add_FleetServiceServicer_to_server(Fleet(self.state, self._go_on), server)
        if self._credentials is None:
            server.add_insecure_port(self.address)
        else:
            server.add_secure_port(self.address, self._credentials)
        await server.start()
        self._server = server

    async def _tell(self, leads: bool) -> None:
        status = health_pb2.HealthCheckResponse
        await self._health.set("", status.SERVING if leads else status.NOT_SERVING)

    async def _stop(self) -> None:
        await self._server.stop(None)

    def _run(self, work: Callable[[], Awaitable[None]]) -> None:
        future: Future[None] = asyncio.run_coroutine_threadsafe(work(), self._loop)  # type: ignore[arg-type]
        future.result(60)
