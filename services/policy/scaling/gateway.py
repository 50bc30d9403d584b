"""Read the demand from the gateway, and have it evacuate instances."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, TypeVar

import grpc

from paceline.internal.v1 import demand_pb2, demand_pb2_grpc
from paceline.times import seconds_of
from paceline.v1 import fleet_pb2, fleet_pb2_grpc
from services.platform.config import ServiceConfig
from services.platform.grpc.channel import open_channel
from services.policy.scaling.metrics import ScalingError
from services.policy.scaling.recommendation import Demand, Due

CALL_SECONDS = 5.0
"""Deadline of short calls."""

T = TypeVar("T")


class GatewayError(ScalingError):
    """Raised when the gateway does not answer, or refuses."""

    kind = "unreachable"


class UnknownInstance(GatewayError):
    """Raised when the gateway has no connection to the instance."""


class GatewayLink:
    """Connection to the gateway. Every call raises GatewayError if it fails."""

    def __init__(self, address: str, config: ServiceConfig) -> None:
        """Connect. ValueError if the token would travel to the gateway in plain text."""
        self._channel = open_channel(address, config)
        self._demand: Any = demand_pb2_grpc.DemandServiceStub(self._channel)
        self._fleet: Any = fleet_pb2_grpc.FleetServiceStub(self._channel)

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close()

    async def demand(self) -> Demand:
        """Return the present demand."""
        found = await _answer(self._demand.GetDemand(demand_pb2.GetDemandRequest(), timeout=CALL_SECONDS))
        return Demand(
            waiting_samples=found.waiting_samples,
            waiting_tokens=found.waiting_tokens,
            running_samples=found.running_samples,
            running_tokens=found.running_tokens,
            dues=tuple(Due(seconds_of(each.time_left), each.tokens_left) for each in found.batches),
            instances=tuple(found.instances),
        )

    async def drain(self, instance_id: str, seconds: float) -> int:
        """Evacuate an instance within `seconds`; return the number of samples that were handed over."""
        request = fleet_pb2.DrainRequest(instance_id=instance_id)
        return int((await _answer(self._fleet.Drain(request, timeout=seconds))).handed_over)

    async def resume(self, instance_id: str) -> None:
        """Let a drained instance take samples again."""
        request = fleet_pb2.ResumeRequest(instance_ids=[instance_id])
        await _answer(self._fleet.Resume(request, timeout=CALL_SECONDS))


async def _answer(call: Awaitable[T]) -> T:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        kind = UnknownInstance if error.code() is grpc.StatusCode.NOT_FOUND else GatewayError
        raise kind(f"{error.code().name}: {error.details()}") from error
