"""What scaling asks of the gateway: the demand, and the evacuation of instances."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import grpc

from paceline.internal.v1 import demand_pb2, demand_pb2_grpc
from paceline.v1 import fleet_pb2, fleet_pb2_grpc
from services.platform.channel import open_channel
from services.platform.config import ServiceConfig
from services.policy.scaling.demand import Demand, Due, InstanceDemand, State

CALL_SECONDS = 5.0
"""Deadline of short calls."""

_STATES = {
    fleet_pb2.INSTANCE_STATE_SERVING: State.SERVING,
    fleet_pb2.INSTANCE_STATE_STALE: State.STALE,
    fleet_pb2.INSTANCE_STATE_PAUSED: State.PAUSED,
    fleet_pb2.INSTANCE_STATE_DRAINING: State.DRAINING,
    fleet_pb2.INSTANCE_STATE_DEAD: State.DEAD,
}


class GatewayError(Exception):
    """The gateway could not be asked, or would not."""


class UnknownInstance(GatewayError):
    """The gateway has no connection to such an instance."""


class GatewayLink:
    """A connection to the gateway. Every method raises GatewayError."""

    def __init__(self, address: str, config: ServiceConfig) -> None:
        """ValueError when the token would travel to the gateway in plain text."""
        self._channel = open_channel(address, config)
        self._demand: Any = demand_pb2_grpc.DemandServiceStub(self._channel)
        self._fleet: Any = fleet_pb2_grpc.FleetServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.close()

    async def demand(self) -> Demand:
        """What there is to do now."""
        found = await _made(self._demand.GetDemand(demand_pb2.GetDemandRequest(), timeout=CALL_SECONDS))
        return Demand(
            waiting_samples=found.waiting_samples,
            waiting_tokens=found.waiting_tokens,
            running_samples=found.running_samples,
            running_tokens=found.running_tokens,
            dues=tuple(Due(each.seconds_left, each.tokens_left) for each in found.batches),
            instances=tuple(_instance(each) for each in found.instances),
        )

    async def drain(self, instance_id: str, seconds: float) -> int:
        """Evacuates an instance, for as long as it takes; the number of samples that were handed over."""
        request = fleet_pb2.DrainRequest(instance_id=instance_id)
        return int((await _made(self._fleet.Drain(request, timeout=seconds))).handed_over)

    async def resume(self, instance_id: str) -> None:
        """Takes a drain back."""
        request = fleet_pb2.ResumeRequest(instance_ids=[instance_id])
        await _made(self._fleet.Resume(request, timeout=CALL_SECONDS))


def _instance(each: demand_pb2.InstanceDemand) -> InstanceDemand:
    return InstanceDemand(
        each.instance_id,
        each.epoch,
        _STATES.get(each.state, State.DEAD),
        each.running,
        each.max_running,
        each.generated_tokens,
    )


async def _made(call: Any) -> Any:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        message = f"{error.code().name}: {error.details()}"
        if error.code() is grpc.StatusCode.NOT_FOUND:
            raise UnknownInstance(message) from error
        raise GatewayError(message) from error
