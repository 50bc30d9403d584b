"""Connection to one instance, and the weight calls on it: stage, load, apply and discard."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
import structlog
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from paceline.internal.v1 import generation_pb2 as pb
from paceline.internal.v1 import generation_pb2_grpc, weight_peer_pb2
from paceline.v1 import weight_pb2
from paceline.weights.expansion import BaseWeights
from services.contracts.errors import ServiceError, Unavailable
from services.gateway.config import GatewayConfig
from services.gateway.scheduler.turns import Pace
from services.gateway.scheduler.work_link import WorkLink
from services.gateway.state.fleet_health import FleetMember
from services.platform.grpc.interceptor import STATUS_DETAILS

log = structlog.get_logger(__name__)

Reply = TypeVar("Reply")

# Seconds that an instance has to end cancelled samples before it applies weights, and between two calls.
_SETTLE_SECONDS, _SETTLE_PAUSE = 5.0, 0.05
# Longest time of a weight transfer: 140 GB at 16 MB/s.
_STREAM_SECONDS = 9000.0

# Field of StageWeights, and time limit; None: the configured one. An instance itself gives up when nothing arrives.
_STAGED_BY: Mapping[type[Any], tuple[str, float | None]] = {
    weight_pb2.DiskWeights: ("disk", None),
    weight_peer_pb2.PeerWeights: ("peers", _STREAM_SECONDS),
}
WeightSource = weight_pb2.DiskWeights | weight_peer_pb2.PeerWeights
"""Weights that an instance is to stage: from a folder, or sent by other instances or a trainer."""


class ConnectionBroken(Exception):
    """Raised when a connection cannot be used; the message says why."""


@dataclass(slots=True, eq=False)
class Connection:
    """Connection to one instance under one epoch, with the gateway's deadlines for weight calls.

    `weights` is held while its weights are being changed. Weight calls return the instance's part of the result.
    """

    config: GatewayConfig
    member: FleetMember
    channel: grpc.aio.Channel
    stub: generation_pb2_grpc.GenerationServiceStub
    link: WorkLink
    weights: asyncio.Lock = field(default_factory=asyncio.Lock)
    task: asyncio.Task[None] | None = None
    # The handshake is done.
    ready: bool = False
    # Set when the connection is closed.
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    # Version that an update has staged here; 0 for none.
    staged_version: int = 0

    @property
    def instance_id(self) -> str:
        return self.member.instance_id

    @property
    def epoch(self) -> int:
        return self.member.epoch

    async def stage(self, version: int, source: WeightSource) -> weight_pb2.InstanceUpdate:
        """Have an instance check the weights and read them into its memory."""
        async with self.weights:
            reply = await self._stage(version, source)
            self.staged_version = version
        return weight_pb2.InstanceUpdate(
            instance_id=self.instance_id,
            policy_version=self.member.version,
            checksum=reply.checksum,
            stage_time=reply.stage_time,
        )

    async def apply(
        self, version: int, in_flight: weight_pb2.InFlight = weight_pb2.IN_FLIGHT_REFUSE
    ) -> weight_pb2.InstanceUpdate:
        """Have an instance apply the staged weights: once it has no samples, or with samples `in_flight`.

        Args:
            version: version of the weights.
            in_flight: REFUSE, CONTINUE or KEEP_KV.
        """
        settled = time.monotonic() + _SETTLE_SECONDS
        async with self.weights:
            while True:
                try:
                    reply = await self._apply(version, in_flight)
                    break
                except grpc.aio.AioRpcError as error:
                    busy = error.code() is grpc.StatusCode.FAILED_PRECONDITION
                    if not busy or time.monotonic() > settled:
                        raise
                    await asyncio.sleep(_SETTLE_PAUSE)
        return weight_pb2.InstanceUpdate(
            instance_id=self.instance_id,
            applied=True,
            policy_version=version,
            apply_time=reply.apply_time,
            dropped_blocks=reply.dropped_blocks,
            kept_samples=reply.kept_samples,
        )

    async def load(self, version: int, source: WeightSource, peers: Sequence[str] = ()) -> None:
        """Have an instance stage and apply weights.

        If they build on weights that it does not hold, it first fetches the base weights from `peers` (addresses).
        """
        async with self.weights:
            self.staged_version = 0
            try:
                await self._stage(version, source)
            except grpc.aio.AioRpcError as error:
                base = base_not_held(received_error(error))
                if base is None or not peers:
                    raise
                await self._fetch(base, peers, error)
                await self._stage(version, source)
            await self._apply(version)

    async def _fetch(self, base: BaseWeights, peers: Sequence[str], error: grpc.aio.AioRpcError) -> None:
        """Have an instance fetch the base weights that others build on; raise `error` if it cannot."""
        source = weight_peer_pb2.PeerWeights(
            update_id=f"base-{base.version}-{base.checksum}", peers=peers, checksum=base.checksum
        )
        log.info("fetching_base", instance=self.instance_id, version=base.version)
        try:
            await self._stage(base.version, source)
        except grpc.aio.AioRpcError as failed:
            log.warning("base_not_fetched", instance=self.instance_id, error=failed.details())
            raise error from failed

    async def discard(self, version: int) -> weight_pb2.InstanceUpdate:
        """Have an instance drop staged weights."""
        self.staged_version = 0
        await self.stub.DiscardWeights(
            pb.DiscardWeightsRequest(policy_version=version), timeout=self.config.handshake_timeout_seconds
        )
        return weight_pb2.InstanceUpdate(instance_id=self.instance_id)

    async def _stage(self, version: int, source: WeightSource) -> pb.StageWeightsResponse:
        request = pb.StageWeightsRequest(policy_version=version, target=weight_pb2.WEIGHT_TARGET_POLICY)
        field, seconds = _STAGED_BY[type(source)]
        getattr(request, field).CopyFrom(source)
        return await self.stub.StageWeights(request, timeout=seconds or self.config.stage_timeout_seconds)

    async def _apply(
        self, version: int, in_flight: weight_pb2.InFlight = weight_pb2.IN_FLIGHT_REFUSE
    ) -> pb.ApplyWeightsResponse:
        return await self.stub.ApplyWeights(
            pb.ApplyWeightsRequest(policy_version=version, in_flight=in_flight),
            timeout=self.config.apply_timeout_seconds,
        )


async def within(connection: Connection, call: Awaitable[Reply]) -> Reply:
    """Return the answer of a call to an instance.

    ConnectionBroken as soon as the connection is closed, whatever the deadline of the call.
    """
    calling = asyncio.ensure_future(call)
    gone = asyncio.ensure_future(connection.gone.wait())
    try:
        await asyncio.wait((calling, gone), return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            raise ConnectionBroken(f"{connection.instance_id} was lost: {connection.member.reason}")
        return await calling
    finally:
        calling.cancel()
        gone.cancel()


InstanceCall = Callable[[Connection], Awaitable[weight_pb2.InstanceUpdate]]


@dataclass(frozen=True, slots=True)
class InstanceResult:
    """Result of one instance's part in a weight update, and the error if it failed."""

    connection: Connection
    update: weight_pb2.InstanceUpdate
    error: ServiceError | None = None


async def attempt(connection: Connection, do: InstanceCall, pace: Pace) -> InstanceResult:
    """Return the result of one instance, which may be an error or the loss of the instance."""
    await pace.wait()
    try:
        return InstanceResult(connection, await within(connection, do(connection)))
    except grpc.aio.AioRpcError as raised:
        error = received_error(raised)
    except ConnectionBroken as broken:
        error = Unavailable(str(broken))
    return failed(connection, error)


def failed(connection: Connection, error: ServiceError) -> InstanceResult:
    """Return the result of an instance that failed."""
    update = weight_pb2.InstanceUpdate(
        instance_id=connection.instance_id,
        policy_version=connection.member.version,
        error=f"{error.code.name}: {error.message}",
    )
    return InstanceResult(connection, update, error)


async def on_all(connections: Sequence[Connection], do: InstanceCall, pace: Pace) -> list[InstanceResult]:
    """Make a call to all instances concurrently, started at this pace. Unavailable if there is none."""
    if not connections:
        raise Unavailable("no live instance", retry_after=2.0)
    return await asyncio.gather(*(attempt(connection, do, pace) for connection in connections))


def received_error(error: grpc.aio.AioRpcError) -> ServiceError:
    """Return the error of a call, with its code, message and google.rpc details, as a ServiceError.

    CANCELLED becomes UNAVAILABLE: the peer has dropped the call.
    """
    if error.code() is grpc.StatusCode.CANCELLED:
        return Unavailable(error.details() or "the call was dropped")
    details: list[Message] = []
    for key, value in error.trailing_metadata() or ():
        if key == STATUS_DETAILS and isinstance(value, bytes):
            details = _unpack(status_pb2.Status.FromString(value))
    return ServiceError(error.details() or error.code().name, *details, code=error.code())


def base_not_held(error: ServiceError) -> BaseWeights | None:
    """Return the base weights that an instance lacks, if that is what the error says."""
    for detail in error.details:
        if isinstance(detail, error_details_pb2.ErrorInfo) and detail.reason == "BASE_NOT_HELD":
            version, _, checksum = detail.metadata["base"].partition(" ")
            if version and checksum:
                return BaseWeights(int(version), checksum)
    return None


def _unpack(status: status_pb2.Status) -> list[Message]:
    found: list[Message] = []
    for packed in status.details:
        kind = getattr(error_details_pb2, packed.TypeName().rpartition(".")[2], None)
        if kind is not None:
            found.append(kind.FromString(packed.value))
    return found
