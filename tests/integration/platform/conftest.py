"""A toy service behind a real server on a real socket, and certificates to serve it with."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from paceline.internal.v1 import demand_pb2_grpc
from paceline.internal.v1.demand_pb2_grpc import DemandServiceServicer
from paceline.v1 import fleet_pb2, fleet_pb2_grpc
from services.platform.config import ServiceConfig
from services.platform.grpc.channel import open_channel
from services.platform.grpc.server import GrpcServer
from services.platform.security import certificates
from tests.support.certificates import Authority

Poll = Callable[[Callable[[], Awaitable[Any]]], Awaitable[Any]]
Serve = Callable[..., AbstractAsyncContextManager["Toy"]]


class ToyFleet(fleet_pb2_grpc.FleetServiceServicer):
    """Does what the test asks for."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.instances = [fleet_pb2.Instance(instance_id="toy", epoch=1)]
        self.trailer: tuple[tuple[str, str], ...] = ()
        self.entered = asyncio.Event()
        self.release = asyncio.Event()
        self.left = asyncio.Event()

    async def ListInstances(self, request: Any, context: Any) -> fleet_pb2.ListInstancesResponse:
        """Answers `instances`, or raises `error`."""
        if self.trailer:
            context.set_trailing_metadata(self.trailer)
        if self.error is not None:
            raise self.error
        return fleet_pb2.ListInstancesResponse(instances=self.instances)

    async def WatchFleet(self, request: Any, context: Any) -> AsyncIterator[fleet_pb2.WatchFleetResponse]:
        """Yield once, then raises `error` or goes on until the caller leaves."""
        try:
            self.entered.set()
            yield fleet_pb2.WatchFleetResponse(instances=self.instances)
            if self.error is not None:
                raise self.error
            await self.release.wait()
        finally:
            self.left.set()

    async def Drain(self, request: Any, context: Any) -> fleet_pb2.DrainResponse:
        """Answers once the test releases it."""
        self.entered.set()
        await self.release.wait()
        return fleet_pb2.DrainResponse(handed_over=3)


@dataclass(slots=True)
class Toy:
    """A running toy service and a stub that calls it the way peers do."""

    servicer: ToyFleet
    server: GrpcServer
    registry: CollectorRegistry
    channel: Any
    stub: Any


@pytest.fixture
def serve() -> Serve:
    """`async with serve(config, client=config2)` runs the toy service."""

    @asynccontextmanager
    async def serving(config: ServiceConfig, client: ServiceConfig | None = None) -> AsyncIterator[Toy]:
        registry = CollectorRegistry()
        server = GrpcServer(config, service="toy", registry=registry)
        servicer = ToyFleet()
        fleet_pb2_grpc.add_FleetServiceServicer_to_server(servicer, server.server)
        demand_pb2_grpc.add_DemandServiceServicer_to_server(DemandServiceServicer(), server.server)
        await server.start()
        try:
            async with open_channel(server.address, client or config) as channel:
                yield Toy(servicer, server, registry, channel, fleet_pb2_grpc.FleetServiceStub(channel))
        finally:
            await server.stop(0)

    return serving


@pytest.fixture
def poll() -> Poll:
    """Call until the answer is true, at most a minute, and return it."""

    async def until(call: Callable[[], Awaitable[Any]]) -> Any:
        deadline = time.monotonic() + 60
        while not (answer := await call()):
            assert time.monotonic() < deadline, "did not come true within a minute"
            await asyncio.sleep(0.02)
        return answer

    return until


@pytest.fixture
def authority(tmp_path: Path) -> Callable[[str], Authority]:
    """Make a certificate authority of the given name."""
    return lambda name: Authority(tmp_path, name)


@pytest.fixture
def immediate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Changed certificates and tokens are seen at their next use."""
    monkeypatch.setattr(certificates, "CHECK_SECONDS", 0.0)
