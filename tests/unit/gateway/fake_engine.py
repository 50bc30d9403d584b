"""An instance behind a channel that goes nowhere: its answers to the gateway's calls, as a test sets them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from paceline.internal.v1 import generation_pb2 as pb
from services.platform.tasks import Notifier


def rpc_error(code: grpc.StatusCode, details: str = "") -> grpc.aio.AioRpcError:
    """Return the error that a failed call raises."""
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)


class FakeWorkCall:
    """The work stream: open until the test ends it."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[pb.WorkResponse | Exception | None] = asyncio.Queue()

    async def __aiter__(self) -> AsyncIterator[pb.WorkResponse]:
        while (message := await self.messages.get()) is not None:
            if isinstance(message, Exception):
                raise message
            yield message

    def cancel(self) -> None:
        self.messages.put_nowait(None)


class FakeEngine:
    """One instance. `errors` holds what a method raises the next times; `gates` what it waits for first."""

    def __init__(self, instance_id: str, *, version: int, epoch: int = 1, checksum: str = "sum") -> None:
        self.instance_id = instance_id
        self.version = version
        self.epoch = epoch
        self.checksum = checksum
        self.staged = 0
        self.in_flight: list[int] = []
        self.calls: list[str] = []
        self.requests: dict[str, Any] = {}
        self.errors: dict[str, list[Exception]] = {}
        self.gates: dict[str, asyncio.Event] = {}
        self.streams: list[FakeWorkCall] = []
        self.closed = 0
        self.state = "serving"
        self._called = Notifier()

    async def called(self, method: str) -> None:
        """Wait until this has been called."""
        async with asyncio.timeout(60):
            while method not in self.calls:
                await self._called.wait()

    # As a channel --------------------------------------------------------------------------------------

    def unary_unary(self, path: str, *_: Any, **__: Any) -> Callable[..., Any]:
        method = path.rpartition("/")[2]

        async def call(request: Any, **_: Any) -> Any:
            self.calls.append(method)
            self.requests[method] = request
            self._called.notify()
            if method in self.gates:
                await self.gates[method].wait()
            if self.errors.get(method):
                raise self.errors[method].pop(0)
            return getattr(self, method)(request)

        return call

    def stream_stream(self, path: str, *_: Any, **__: Any) -> Callable[..., Any]:
        def call(requests: AsyncIterator[pb.WorkRequest]) -> FakeWorkCall:
            self.streams.append(FakeWorkCall())
            return self.streams[-1]

        return call

    unary_stream = stream_unary = stream_stream

    async def close(self) -> None:
        self.closed += 1

    # As a service --------------------------------------------------------------------------------------

    def GetStatus(self, request: pb.GetStatusRequest) -> pb.GetStatusResponse:
        response = pb.GetStatusResponse()
        response.instance.instance_id = self.instance_id
        response.instance.epoch = self.epoch
        response.instance.policy_version = self.version
        return response

    def StageWeights(self, request: pb.StageWeightsRequest) -> pb.StageWeightsResponse:
        self.staged = request.policy_version
        response = pb.StageWeightsResponse(checksum=self.checksum)
        response.stage_time.FromSeconds(2)
        return response

    def ApplyWeights(self, request: pb.ApplyWeightsRequest) -> pb.ApplyWeightsResponse:
        assert self.staged == request.policy_version, "applied what was not staged"
        self.version, self.staged = self.staged, 0
        self.in_flight.append(request.in_flight)
        return pb.ApplyWeightsResponse(kept_samples=4)

    def DiscardWeights(self, request: pb.DiscardWeightsRequest) -> pb.DiscardWeightsResponse:
        self.staged = 0
        return pb.DiscardWeightsResponse()
