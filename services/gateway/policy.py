"""Knobs and decisions, for the fleet service: knobs through the policy service, decisions from Redis."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

from google.protobuf import json_format
from redis.asyncio import Redis

from paceline.internal.v1 import policy_pb2 as pb
from paceline.internal.v1 import policy_pb2_grpc as rpc
from paceline.v1 import fleet_pb2
from services.gateway.config import GatewayConfig
from services.gateway.leader import Leader
from services.platform.decisions import Decision, DecisionLog
from services.platform.registry import Registry
from services.platform.store import Keys

SERVICE = "policy"
_CALL_SECONDS = 5.0
_WITHOUT = "instances go on with the knobs that they have"


class PolicyFront:
    """Passes on what the policy service is asked, and reads what was decided."""

    def __init__(self, config: GatewayConfig, redis: Redis) -> None:
        registry = Registry(redis, Keys(config.namespace))
        self._leader = Leader(config, registry, SERVICE, rpc.PolicyServiceStub, _WITHOUT)
        self._decisions = DecisionLog(redis, config.namespace)

    async def get(self, request: fleet_pb2.GetPolicyRequest) -> fleet_pb2.GetPolicyResponse:
        """A scope's knobs.

        Raises:
            Unavailable: no policy service leads.
            ServiceError: it refused, with its code and details.
        """
        asked = pb.GetKnobsRequest(run_id=request.run_id, model=request.model, pool=request.pool)
        answer = await self._leader.call("GetKnobs", asked, _CALL_SECONDS)
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
        answer = await self._leader.call("SetKnobs", asked, _CALL_SECONDS)
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
