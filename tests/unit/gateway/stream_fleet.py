"""Instances without engines whose weights travel as in a deployment, and a gateway's updater, in one process.

Servers, connections, receiving, checking and serving are real; of the gateway only the registry and Redis are not.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from prometheus_client import CollectorRegistry

import paceline
from paceline import WeightStream
from paceline.internal.v1 import generation_pb2 as pb
from paceline.internal.v1 import generation_pb2_grpc as rpc
from paceline.internal.v1 import weight_peer_pb2
from paceline.internal.v1 import weight_peer_pb2_grpc as peer_rpc
from paceline.times import duration
from paceline.v1 import weight_pb2, weight_pb2_grpc
from paceline.v1 import weight_stream_pb2_grpc as stream_rpc
from paceline.weights import safetensors
from services.gateway.config import GatewayConfig
from services.gateway.instances.connection import Connection
from services.gateway.instances.updater import InFlightSamples, Updater
from services.gateway.server.trainer_services import WeightServicer
from services.gateway.state.update_book import PublishedVersion, UpdateBook
from services.generation.config import GenerationConfig
from services.generation.engine.types import TensorSpec
from services.generation.server.weight_stream_service import WeightPeerService, WeightStreamService
from services.generation.weights.adoption import AdoptedWeights
from services.generation.weights.expansion import GivenWeights, WeightReader
from services.generation.weights.staging import StagedWeights, most_bytes
from services.generation.weights.stream.metrics import INSTANCE, TRAINER, WeightStreamMetrics
from services.generation.weights.stream.streams import WeightStreams
from services.platform.config import ServiceConfig
from services.platform.grpc.channel import open_channel
from services.platform.grpc.server import GrpcServer
from services.platform.tasks import end
from tests.unit.gateway.scheduler_parts import VERSION, SchedulerParts
from tests.unit.gateway.test_updater import RecordingRoster, RecordingStore

WAIT = 60.0
"""Deadline of every wait in seconds, far above what anything takes."""
NEW = VERSION + 1
COUNT, SIZE = 24, 16_384
STREAM = WeightStream(piece_bytes=32768, window_bytes=4 * 32768, shard_bytes=600_000)
SETTINGS = {"weight_piece_bytes": 16384, "weight_stall_seconds": 2.0}
MANIFEST = {f"w{number}": TensorSpec(f"w{number}", (SIZE,), "F32") for number in range(COUNT)}


class Tensors(Mapping[str, Any]):
    """A model that calls `at_half` when half of it was read, each time that it is read."""

    def __init__(self, at_half: Callable[[], object] = lambda: None, seed: int = 0) -> None:
        self._at_half = at_half
        self._seed = seed

    def __getitem__(self, name: str) -> Any:
        return np.full(SIZE, int(name[1:]) + self._seed, np.float32)

    def __len__(self) -> int:
        return COUNT

    def __iter__(self) -> Iterator[str]:
        for number in range(COUNT):
            if number == COUNT // 2:
                self._at_half()
            yield f"w{number}"


async def until(condition: Callable[[], object], what: str) -> None:
    """Wait until the condition holds; fails when it does not in time."""
    try:
        async with asyncio.timeout(WAIT):
            while not condition():  # noqa: ASYNC110 (what is waited for sets no event)
                await asyncio.sleep(0.005)
    except TimeoutError:
        pytest.fail(f"waited {WAIT} s in vain until {what}")


class WeightNode(rpc.GenerationServiceServicer):
    """An instance: its weights are real, its engine is a version number."""

    def __init__(
        self,
        instance_id: str,
        folder: Path,
        adopt: Callable[[Path], AdoptedWeights] = AdoptedWeights,
        manifest: Mapping[str, TensorSpec] = MANIFEST,
        **settings: Any,
    ) -> None:
        config = GenerationConfig(model="none", instance_id=instance_id, **{**SETTINGS, **settings})
        self.instance_id = instance_id
        self.folder = folder
        self.version = VERSION
        self.goes_on = False
        self.checked: StagedWeights | None = None
        # Set to let it check what has come.
        self.gate = asyncio.Event()
        self.gate.set()
        self.metrics = WeightStreamMetrics(CollectorRegistry())
        self.adopted = adopted = adopt(folder)
        self.reader = WeightReader(folder / "none", manifest, None, adopted)
        self.weights = WeightStreams(
            config,
            adopted,
            lambda address: open_channel(address, config),
            self.metrics,
            most_bytes=most_bytes(manifest.values()),
        )
        self.server = GrpcServer(config, service="generation", registry=CollectorRegistry())
        rpc.add_GenerationServiceServicer_to_server(self, self.server.server)
        stream_rpc.add_WeightStreamServiceServicer_to_server(
            WeightStreamService(self.weights), self.server.server
        )
        peer_rpc.add_WeightPeerServiceServicer_to_server(WeightPeerService(self.weights), self.server.server)
        self.dead = False

    @property
    def received(self) -> tuple[int, int]:
        """Bytes that came from the trainer, and from other instances."""
        trainer, instance = (
            int(self.metrics.received.labels(each)._value.get()) for each in (TRAINER, INSTANCE)
        )
        return trainer, instance

    async def kill(self) -> None:
        """End as a killed process does."""
        if not self.dead:
            self.dead = True
            await self.server.stop(0)
            await self.weights.close()

    async def StageWeights(self, request: pb.StageWeightsRequest, context: Any) -> pb.StageWeightsResponse:
        began = time.monotonic()
        version = request.policy_version
        if request.WhichOneof("source") == "disk":
            given = GivenWeights(Path(request.disk.path), request.disk.checksum)
            self.checked = await asyncio.to_thread(self.reader.read, version, given)
        else:
            received = await self.weights.receive(version, request.peers)
            await self.gate.wait()
            read = partial(self.reader.read_received, version, received.folder, received.checksum)
            with self.weights.judging(request.peers.update_id):
                self.checked = await asyncio.to_thread(read, received.contents)
        took = duration(time.monotonic() - began)
        return pb.StageWeightsResponse(checksum=self.checked.checksum, stage_time=took)

    async def ApplyWeights(self, request: pb.ApplyWeightsRequest, context: Any) -> pb.ApplyWeightsResponse:
        assert self.checked is not None
        assert self.checked.version == request.policy_version
        self.version = request.policy_version
        self.adopted.prune(self.version, self.checked.checksum)
        self.goes_on = request.in_flight == weight_pb2.IN_FLIGHT_CONTINUE
        return pb.ApplyWeightsResponse()

    async def DiscardWeights(
        self, request: pb.DiscardWeightsRequest, context: Any
    ) -> pb.DiscardWeightsResponse:
        await self.weights.end(request.policy_version)
        self.adopted.hide(request.policy_version)
        return pb.DiscardWeightsResponse()


class StreamFleet:
    """Nodes, the updater that serves a trainer, and the trainer's client."""

    def __init__(self, folder: Path, update_timeout: float) -> None:
        self.folder = folder
        self.nodes: list[WeightNode] = []
        self.loop = asyncio.get_running_loop()
        self.parts = SchedulerParts()
        self.roster: Any = RecordingRoster()
        store: Any = RecordingStore()
        book = UpdateBook(update_timeout, PublishedVersion(VERSION))
        self.updater = Updater(
            book,
            store,
            self.parts.fleet,
            self.roster,
            InFlightSamples(book, self.parts.scheduler, self.parts.metrics),
            self.parts.metrics,
            self.parts.recorded.append,
        )
        term: Any = SimpleNamespace(
            updater=self.updater, book=book, fleet=self.parts.fleet, drafter_version=0
        )
        self._server = GrpcServer(ServiceConfig(), service="gateway", registry=CollectorRegistry())
        weight_pb2_grpc.add_WeightServiceServicer_to_server(WeightServicer(lambda: term), self._server.server)
        self._running: asyncio.Task[None] | None = None
        self.client: paceline.AsyncClient

    async def start(self) -> None:
        await self._server.start()
        await self._server.set_serving(True)
        self._running = asyncio.create_task(self.updater.run())
        self.client = paceline.AsyncClient(self._server.address)

    async def stop(self) -> None:
        await self.client.close()
        if self._running is not None:
            await end([self._running])
        for connection in self.roster.connections.values():
            await connection.channel.close()
        for node in self.nodes:
            await node.kill()
        await self._server.stop(0)

    async def add(self, folder: Path | None = None, **kwargs: Any) -> WeightNode:
        """Start an instance, which the gateway finds at once."""
        name = f"i{len(self.nodes)}"
        node = WeightNode(name, folder or self.folder / name, **kwargs)
        await node.server.start()
        self.nodes.append(node)
        self.parts.join(name, node.server.address)
        member = self.parts.fleet.members[name]
        channel = grpc.aio.insecure_channel(node.server.address)
        stub = rpc.GenerationServiceStub(channel)  # type: ignore[no-untyped-call]
        link: Any = None
        connection = Connection(GatewayConfig(), member, channel, stub, link, ready=True)
        self.roster.connections[name] = connection
        return node

    async def kill(self, node: WeightNode) -> None:
        """Kill an instance, which the gateway notices."""
        await node.kill()
        self.roster.connections[node.instance_id].gone.set()

    async def join(self, node: WeightNode, update_id: str, checksum: str, peers: list[WeightNode]) -> None:
        """Bring an instance to a published version, as the gateway does it."""
        source = weight_peer_pb2.PeerWeights(
            update_id=update_id, checksum=checksum, peers=[each.server.address for each in peers]
        )
        await self.roster.connections[node.instance_id].load(NEW, source)

    async def push(
        self, tensors: safetensors.Tensors, stream: WeightStream = STREAM
    ) -> paceline.UpdateFinished:
        async with asyncio.timeout(WAIT):
            return await self.client.run("run", weights=stream).push_weights(tensors)

    def once(self, work: Callable[[], Awaitable[None]]) -> Callable[[], None]:
        """Return a function for another thread that has the event loop do something, the first time."""
        done: list[bool] = []

        async def run() -> None:
            await work()

        def call() -> None:
            if not done:
                done.append(True)
                asyncio.run_coroutine_threadsafe(run(), self.loop).result(WAIT)

        return call

    def check(self, nodes: list[WeightNode], seed: int = 0) -> int:
        """Check that instances have exactly what a folder would have; return its bytes."""
        expected = self.folder / "expected"
        if not expected.exists():
            expected.mkdir()
            safetensors.write(expected, Tensors(seed=seed), STREAM.shard_bytes)
        wanted = {path.name: path.read_bytes() for path in expected.iterdir()}
        assert len(wanted) > 3
        for node in nodes:
            assert node.checked is not None
            assert node.checked.checksum == safetensors.checksum(expected)
            (place,) = [path for path in node.folder.iterdir() if path.name.startswith("v")]
            assert {path.name: path.read_bytes() for path in place.iterdir()} == wanted
            assert not list(node.folder.glob(".receiving*"))
        return sum(map(len, wanted.values()))


@asynccontextmanager
async def stream_fleet(folder: Path, count: int, update_timeout: float = WAIT) -> AsyncIterator[StreamFleet]:
    fleet = StreamFleet(folder, update_timeout)
    await fleet.start()
    try:
        for _ in range(count):
            await fleet.add()
        yield fleet
    finally:
        await fleet.stop()
