"""KnobService: the knobs of this instance, and its account of speculation."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import structlog
from pydantic import ValidationError
from redis.asyncio import Redis
from redis.exceptions import RedisError

from paceline.internal.v1 import policy_pb2 as pb
from paceline.internal.v1 import policy_pb2_grpc as rpc
from services.generation.config import GenerationConfig
from services.generation.instance import Instance
from services.generation.steering.ledger import Switched
from services.generation.steering.steered import SteeredPlan
from services.policy.convert import from_struct, tally_message
from services.policy.knobs import check
from services.policy.machine import machine_name
from services.policy.models import architecture_of
from services.policy.step_time import StepTime, UnsupportedArchitecture
from services.policy.store import KnobStore
from services.policy.stored import Subject

_log = structlog.get_logger(__name__)
_RECALL_SECONDS = 2.0
Context = grpc.aio.ServicerContext[Any, Any]


class KnobService(rpc.KnobServiceServicer):
    """Applies knobs between two engine steps. Without speculation it takes them, and nothing changes."""

    def __init__(self, config: GenerationConfig, instance: Instance, dtype: str, device: str) -> None:
        """`dtype` and `device` are the engine's."""
        self._config = config
        self._instance = instance
        self._calibration = _calibration(config, dtype, device)
        # Of an instance without a plan.
        self._revision = 0

    @property
    def _plan(self) -> SteeredPlan | None:
        return self._instance.steering

    async def recall(self, redis: Redis) -> None:
        """Work by the knobs that are kept, before the first sample comes. What cannot be read comes later."""
        try:
            async with asyncio.timeout(_RECALL_SECONDS):
                known = await KnobStore(redis, self._config.namespace).load()
        except (RedisError, TimeoutError) as error:
            _log.warning("knobs_not_recalled", error=str(error))
            return
        plan = self._plan
        if plan is not None and known.revision:
            shared, runs = known.settings_for(self._config.model, self._config.pool)
            prepared = plan.prepared(known.revision, shared, runs, known.caps())
            await self._call(lambda: plan.apply(prepared))

    async def ApplyKnobs(self, request: pb.ApplyKnobsRequest, context: Context) -> pb.ApplyKnobsResponse:
        """Work by these knobs from the next engine step on."""
        shared = check(from_struct(request.knobs))
        runs = {run_id: check(from_struct(setting)) for run_id, setting in request.runs.items()}
        step_time = _step_time(request.step_time)
        plan = self._plan
        if plan is None:
            self._revision = max(self._revision, request.revision)
            return pb.ApplyKnobsResponse(revision=self._revision, speculates=False)
        prepared = plan.prepared(request.revision, shared, runs, dict(request.run_caps), step_time)
        revision = await self._call(lambda: plan.apply(prepared))
        return pb.ApplyKnobsResponse(revision=revision, speculates=True)

    async def GetPolicyReport(
        self, request: pb.GetPolicyReportRequest, context: Context
    ) -> pb.GetPolicyReportResponse:
        """The account of the latest steps."""
        response = pb.GetPolicyReportResponse(
            instance_id=self._config.instance_id,
            epoch=self._instance.epoch,
            revision=self._revision,
            calibration=self._calibration,
            model=self._config.model,
            pool=self._config.pool,
        )
        plan = self._plan
        if plan is not None:
            await self._call(lambda: _account(plan, request.after_switch, response))
        return response

    async def _call(self, function: Any) -> Any:
        return await asyncio.wrap_future(self._instance.loop.call(function))


def _account(plan: SteeredPlan, after_switch: int, response: pb.GetPolicyReportResponse) -> None:
    response.revision = plan.revision
    response.steps.extend(tally_message(key, totals) for key, totals in plan.ledger.steps())
    response.switches.extend(map(_switch, plan.ledger.switches(after_switch)))


def _switch(switched: Switched) -> pb.Switch:
    message = pb.Switch(
        serial=switched.serial,
        on=switched.on,
        predicted_speedup=switched.speedup,
        requests=switched.requests,
        run_id=switched.run_id,
        step=switched.step,
    )
    message.time.FromNanoseconds(int(switched.time * 1e9))
    return message


def _step_time(text: str) -> StepTime | None:
    """The model that came with knobs; None where there is none, or one of another version of Paceline.

    Knobs do not depend on it, and a kill switch must reach old and new instances alike while a fleet is upgraded.
    """
    if not text:
        return None
    try:
        return StepTime.model_validate_json(text)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        _log.warning("step_time_unreadable", problems=problems)
        return None


def _calibration(config: GenerationConfig, dtype: str, device: str) -> str:
    """File name of the calibration of this model, machine and dtype; empty where there is no such model."""
    folder = Path(config.model)
    try:
        architecture = architecture_of(folder, dtype)
    except UnsupportedArchitecture:
        return ""
    machine = machine_name() if device == "cpu" else device
    return Subject.of(folder.resolve().name, architecture, machine, dtype).file_name
