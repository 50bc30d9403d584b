"""Servicer of KnobService: the knobs of this instance, and its account of speculation."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from paceline.convert.fleet import knobs_to_proto
from paceline.internal.v1 import policy_pb2 as pb
from paceline.internal.v1 import policy_pb2_grpc as rpc
from services.contracts.knob_store import KnobStore
from services.contracts.knobs import Knobs, check, setting_of, tally_message
from services.generation.config import GenerationConfig
from services.generation.loop.engine_loop import EngineLoop
from services.generation.speculation.planner import KnobDrivenPlanner
from services.platform.redis.registry import Registration

_log = structlog.get_logger(__name__)
# A shorter limit would not help: without Redis the instance cannot register either.
_RECALL_SECONDS = 10.0
Context = grpc.aio.ServicerContext[Any, Any]


class KnobService(rpc.KnobServiceServicer):
    """Applies knobs between two engine steps. Without speculation it accepts them without effect."""

    def __init__(
        self,
        config: GenerationConfig,
        loop: EngineLoop,
        planner: KnobDrivenPlanner | None,
        registration: Registration,
    ) -> None:
        """Without a `planner` the instance was started without speculation, and no knob changes that."""
        self._config = config
        self._loop = loop
        self._planner = planner
        self._registration = registration
        # Latest revision, kept for an instance without a planner.
        self._revision = 0

    async def recall(self, redis: Redis) -> None:
        """Apply the stored knobs before the first sample arrives. Without Redis they are applied later."""
        try:
            async with asyncio.timeout(_RECALL_SECONDS):
                known = await KnobStore(redis, self._config.namespace).load()
        except (RedisError, TimeoutError) as error:
            _log.warning("knobs_not_recalled", error=str(error))
            return
        planner = self._planner
        if planner is not None and known.revision:
            shared, runs = known.settings_for(self._config.model, self._config.pool)
            knobs = planner.resolve(known.revision, shared, runs, known.caps())
            await self._loop.execute(lambda: planner.apply(knobs))

    async def ApplyKnobs(self, request: pb.ApplyKnobsRequest, context: Context) -> pb.ApplyKnobsResponse:
        """Apply knobs from the next engine step on."""
        shared = check(setting_of(request.knobs))
        runs = {run_id: check(setting_of(setting)) for run_id, setting in request.runs.items()}
        planner = self._planner
        if planner is None:
            self._revision = max(self._revision, request.revision)
            return pb.ApplyKnobsResponse(revision=self._revision, speculates=False)
        knobs = planner.resolve(request.revision, shared, runs, dict(request.run_caps))
        revision = await self._loop.execute(lambda: planner.apply(knobs))
        return pb.ApplyKnobsResponse(revision=revision, speculates=True)

    async def GetSpeculationReport(
        self, request: pb.GetSpeculationReportRequest, context: Context
    ) -> pb.GetSpeculationReportResponse:
        """Return the account of the latest steps."""
        planner = self._planner
        own = Knobs(speculation=False) if planner is None else planner.base
        response = pb.GetSpeculationReportResponse(
            instance_id=self._config.instance_id,
            epoch=self._registration.record.epoch,
            revision=self._revision,
            model=self._config.model,
            pool=self._config.pool,
            own_knobs=knobs_to_proto(own.model_dump(mode="json")),
        )
        if planner is not None:
            await self._loop.execute(lambda: _account(planner, request.after_switch, response))
        return response


def _account(
    planner: KnobDrivenPlanner, after_switch: int, response: pb.GetSpeculationReportResponse
) -> None:
    response.revision = planner.knobs.revision
    response.steps.extend(tally_message(key, totals) for key, totals in planner.account.steps())
    response.switches.extend(planner.account.switches(after_switch))
