"""The drafter that is trained online, for the fleet service."""

from __future__ import annotations

from redis.asyncio import Redis

from paceline.internal.v1 import drafter_pb2 as pb
from paceline.internal.v1 import drafter_pb2_grpc as rpc
from paceline.v1 import fleet_pb2
from services.gateway.config import GatewayConfig
from services.gateway.feed import SERVICE
from services.gateway.leader import Leader
from services.platform.registry import Registry
from services.platform.store import Keys

# A roll-back reads a checkpoint from end to end.
_CALL_SECONDS, _ROLL_BACK_SECONDS = 5.0, 120.0
_WITHOUT = "instances go on with the drafter that they have"


class DrafterFront:
    """Passes on what the learner is asked. Raises as `Leader.call`."""

    def __init__(self, config: GatewayConfig, redis: Redis) -> None:
        registry = Registry(redis, Keys(config.namespace))
        self._leader = Leader(config, registry, SERVICE, rpc.LearnerServiceStub, _WITHOUT)

    async def get(self) -> fleet_pb2.GetDrafterResponse:
        """What is published, and what it was learned from."""
        answer = await self._leader.call("GetLearner", pb.GetLearnerRequest(), _CALL_SECONDS)
        response = fleet_pb2.GetDrafterResponse(
            version=answer.version,
            path=answer.path,
            updates=answer.updates,
            samples_used=answer.samples_used,
            policy_version=answer.policy_version,
            candidate_acceptance_length=answer.candidate_acceptance_length,
            acceptance_length=answer.current_acceptance_length,
            rejected_candidates=answer.rejected_candidates,
            roll_backs=answer.roll_backs,
        )
        if answer.HasField("published"):
            response.published.CopyFrom(answer.published)
        return response

    async def roll_back(self, request: fleet_pb2.RollBackDrafterRequest) -> fleet_pb2.RollBackDrafterResponse:
        """Goes back to the version before."""
        asked = pb.RollBackRequest(reason=request.reason, version=request.version)
        answer = await self._leader.call("RollBack", asked, _ROLL_BACK_SECONDS)
        return fleet_pb2.RollBackDrafterResponse(version=answer.version)
