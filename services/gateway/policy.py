"""Knobs and decisions, for the fleet service: knobs through the policy service, decisions from Redis."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import structlog
from google.protobuf import json_format
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from redis.asyncio import Redis

from paceline.internal.v1 import policy_pb2 as pb
from paceline.internal.v1 import policy_pb2_grpc as rpc
from paceline.v1 import fleet_pb2
from services.gateway.config import GatewayConfig
from services.platform.channel import open_channel
from services.platform.decisions import Decision, DecisionLog
from services.platform.errors import ServiceError, Unavailable
from services.platform.registry import InstanceRecord, Registry
from services.platform.store import OUTAGES, Keys

log = structlog.get_logger(__name__)

SERVICE = "policy"
_LEADING = "serving"
_CALL_SECONDS = 5.0
_STATUS_KEY = "grpc-status-details-bin"


class PolicyFront:
    """Finds the policy service that leads, anew for each call: knobs are seldom asked for."""

    def __init__(self, config: GatewayConfig, redis: Redis) -> None:
        self._config = config
        self._registry = Registry(redis, Keys(config.namespace))
        self._decisions = DecisionLog(redis, config.namespace)

    async def get(self, request: fleet_pb2.GetPolicyRequest) -> fleet_pb2.GetPolicyResponse:
        """A scope's knobs.

        Raises:
            Unavailable: no policy service leads.
            ServiceError: it refused, with its code and details.
        """
        asked = pb.GetKnobsRequest(run_id=request.run_id, model=request.model, pool=request.pool)
        answer = await self._call("GetKnobs", asked)
        return fleet_pb2.GetPolicyResponse(revision=answer.revision, knobs=answer.knobs)

    async def set(self, request: fleet_pb2.SetPolicyRequest) -> fleet_pb2.SetPolicyResponse:
        """Changes a scope's knobs, and raises as `get`."""
        asked = pb.SetKnobsRequest(
            run_id=request.run_id,
            model=request.model,
            pool=request.pool,
            revision=request.revision,
            knobs=request.knobs,
        )
        answer = await self._call("SetKnobs", asked)
        return fleet_pb2.SetPolicyResponse(
            revision=answer.revision,
            applied_instance_ids=answer.applied,
            pending_instance_ids=answer.pending,
        )

    async def watch(
        self, request: fleet_pb2.WatchDecisionsRequest
    ) -> AsyncIterator[fleet_pb2.WatchDecisionsResponse]:
        """Decisions as they come, without end, those since a time that was asked for first."""
        since = request.since.ToNanoseconds() / 1e9 if request.HasField("since") else time.time()
        # Entries are named by the time they came, in milliseconds; what is decided is written a little later.
        after = str(max(0, int(since * 1000) - 1))
        async for decision in self._decisions.follow(after, request.run_id):
            if decision.time >= since:
                yield _response(decision)

    async def _call(self, method: str, request: Message) -> Any:
        record = await self._leader()
        try:
            async with open_channel(record.address, self._config) as channel:
                call = getattr(rpc.PolicyServiceStub(channel), method)
                return await call(request, timeout=_CALL_SECONDS)
        except ValueError as error:
            # The token may not go there.
            raise Unavailable(f"the policy service cannot be called: {error}") from error
        except grpc.aio.AioRpcError as error:
            raise _translated(error) from error

    async def _leader(self) -> InstanceRecord:
        try:
            records = await self._registry.list(SERVICE)
        except OUTAGES as error:
            raise Unavailable(f"the policy service cannot be looked up: {error}") from error
        leaders = [record for record in records.values() if record.state == _LEADING]
        if not leaders:
            raise Unavailable("no policy service is running; instances go on with the knobs that they have")
        return max(leaders, key=lambda each: (each.registered_at, each.instance_id))


def _translated(error: grpc.aio.AioRpcError) -> ServiceError:
    """What the policy service answered, with its details, as this gateway's own answer."""
    details = []
    for key, value in error.trailing_metadata() or ():
        if key == _STATUS_KEY and isinstance(value, bytes):
            details = _unpacked(status_pb2.Status.FromString(value))
    return ServiceError(error.details() or error.code().name, *details, code=error.code())


def _unpacked(status: status_pb2.Status) -> list[Message]:
    found: list[Message] = []
    for packed in status.details:
        kind = getattr(error_details_pb2, packed.TypeName().rpartition(".")[2], None)
        if kind is not None:
            found.append(kind.FromString(packed.value))
    return found


def _response(decision: Decision) -> fleet_pb2.WatchDecisionsResponse:
    response = fleet_pb2.WatchDecisionsResponse(
        kind=decision.kind,
        reason=decision.reason,
        predicted_gain=decision.predicted_gain,
        run_id=decision.run_id,
    )
    response.time.FromNanoseconds(int(decision.time * 1e9))
    json_format.ParseDict(dict(decision.details), response.details)
    return response
