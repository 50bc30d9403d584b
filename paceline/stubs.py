"""Generated stubs of a channel, by the names of their services."""

from __future__ import annotations

from typing import Any

from paceline.v1 import fleet_pb2_grpc, rollout_pb2_grpc, weight_pb2_grpc


def stubs_on(channel: Any) -> dict[str, Any]:
    """Return the stubs of a grpc.Channel or a grpc.aio.Channel."""
    return {
        "Rollout": rollout_pb2_grpc.RolloutServiceStub(channel),  # type: ignore[no-untyped-call]
        "Weight": weight_pb2_grpc.WeightServiceStub(channel),  # type: ignore[no-untyped-call]
        "Fleet": fleet_pb2_grpc.FleetServiceStub(channel),  # type: ignore[no-untyped-call]
    }
