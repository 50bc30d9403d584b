"""gRPC servicers of FleetService and DemandService.

FleetService covers instances, knobs, decisions and the online drafter. DemandService reports the remaining work to
services that choose the number of instances. Calls about knobs and the drafter are forwarded to the leader of the
service that owns them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
from google.protobuf import json_format
from google.protobuf.message import Message
from redis.asyncio import Redis

from paceline.internal.v1 import (
    demand_pb2,
    demand_pb2_grpc,
    drafter_pb2,
    drafter_pb2_grpc,
    generation_pb2,
    policy_pb2,
    policy_pb2_grpc,
)
from paceline.times import duration, seconds_of, timestamp
from paceline.v1 import fleet_pb2 as pb
from paceline.v1 import fleet_pb2_grpc
from services.contracts.errors import InvalidArgument, NotFound, ServiceError, Unavailable
from services.gateway.api.validation import check_watch
from services.gateway.config import GatewayConfig
from services.gateway.feeds.learner import SERVICE as LEARNER
from services.gateway.instances.connection import Connection, ConnectionBroken, received_error, within
from services.gateway.scheduler.active_batches import RunningBatch
from services.gateway.state.fleet_health import FleetMember, MemberState
from services.gateway.term import LeadershipTerm
from services.platform.grpc.channel import open_channel
from services.platform.redis.connection import OUTAGES, Keys
from services.platform.redis.decision_log import DecisionLog, DecisionRecord
from services.platform.redis.registry import InstanceRecord, Registry
from services.platform.security.caller import may_see
from services.platform.service import LEADING

Context = grpc.aio.ServicerContext

POLICY = "policy"
# Service -> its stub, and the setting that instances keep while it has no leader.
_LEADERS: dict[str, tuple[Callable[[grpc.aio.Channel], Any], str]] = {
    POLICY: (policy_pb2_grpc.PolicyServiceStub, "knobs"),
    LEARNER: (drafter_pb2_grpc.LearnerServiceStub, "drafter"),
}
# Fields of an instance, and counts of its load, that are shown as registered.
_RECORDED = (
    *("instance_id", "epoch", "address", "max_running", "max_model_len", "vocab_size", "model", "device"),
    *("metrics_address", "refused_features", "keeps_kv"),
)
_COUNTS = ("running", "waiting", "generated_tokens", "steps")
# Fields of the learner that have the same name in the response.
_LEARNED = (
    *("drafter_version", "path", "updates", "samples_used", "policy_version", "rejected_candidates"),
    *("candidate_acceptance_length", "rollbacks"),
)
_CALL_SECONDS = 5.0
# A rollback reads a whole checkpoint.
_ROLLBACK_SECONDS = 120.0


def instance_message(member: FleetMember) -> pb.Instance:
    """Return an instance as trainers and operators see it."""
    record, load = member.record, member.load
    return pb.Instance(
        state=_state(member),
        policy_version=member.version,
        load=pb.InstanceLoad(
            kv_usage=load.get("kv_usage", 0.0),
            step_time=duration(load.get("step_seconds", 0.0)),
            **{name: int(load.get(name, 0)) for name in _COUNTS},
        ),
        registered_at=timestamp(record.registered_at),
        **fields_of(record, *_RECORDED),
    )


def demand_message(member: FleetMember, running: int) -> demand_pb2.InstanceDemand:
    """Return an instance as the scaling service sees it, with this many running samples."""
    return demand_pb2.InstanceDemand(
        state=_state(member),
        running=running,
        generated_tokens=int(member.load.get("generated_tokens", 0)),
        **fields_of(member.record, "instance_id", "epoch", "max_running"),
    )


def _state(member: FleetMember) -> str:
    return f"INSTANCE_STATE_{member.state.name}"


def fields_of(source: object, *names: str) -> dict[str, Any]:
    """Return fields of an object by name, for a message that has the same field names."""
    return {name: getattr(source, name) for name in names}


class DemandServicer(demand_pb2_grpc.DemandServiceServicer):
    """Servicer for the term of leadership that `term` returns.

    `term` raises Unavailable while another gateway leads.
    """

    def __init__(self, term: Callable[[], LeadershipTerm]) -> None:
        self._term = term

    async def GetDemand(
        self, request: demand_pb2.GetDemandRequest, context: Context
    ) -> demand_pb2.GetDemandResponse:
        term = self._term()
        response = demand_pb2.GetDemandResponse()
        now = time.time()
        for running in list(term.batches.by_key.values()):
            _add(response, running, now)
        for instance_id, member in sorted(term.fleet.members.items()):
            link = term.placer.links.get(instance_id)
            response.instances.append(demand_message(member, 0 if link is None else len(link.held)))
        return response


def _add(response: demand_pb2.GetDemandResponse, running: RunningBatch, now: float) -> None:
    left = running.left
    response.waiting_samples += left.waiting_samples
    response.waiting_tokens += left.waiting_tokens
    response.running_samples += left.running_samples
    response.running_tokens += left.running_tokens
    response.batches.add(
        time_left=duration(running.batch.deadline_at - now),
        tokens_left=left.waiting_tokens + left.running_tokens,
    )


_WITHOUT_LEADER = ("GetKnobs", "SetKnobs", "WatchDecisions", "GetDrafter", "RollBackDrafter")
WITHOUT_LEADER = frozenset(f"/paceline.v1.FleetService/{name}" for name in _WITHOUT_LEADER)
"""Methods that every gateway answers, even if no gateway leads."""


class FleetServicer(fleet_pb2_grpc.FleetServiceServicer):
    """Servicer of instances for the term of leadership that `term` returns.

    Calls in `WITHOUT_LEADER` need no leadership: any gateway forwards them to the service that decides, or reads
    the answer from Redis.
    """

    def __init__(self, term: Callable[[], LeadershipTerm], config: GatewayConfig, redis: Redis) -> None:
        self._term = term
        self._config = config
        self._registry = Registry(redis, Keys(config.namespace))
        self._decisions = DecisionLog(redis, config.namespace)

    # Instances -----------------------------------------------------------------------------------------

    async def ListInstances(
        self, request: pb.ListInstancesRequest, context: Context
    ) -> pb.ListInstancesResponse:
        return pb.ListInstancesResponse(instances=_instances(self._term()))

    async def WatchFleet(
        self, request: pb.WatchFleetRequest, context: Context
    ) -> AsyncIterator[pb.WatchFleetResponse]:
        while True:
            term = self._term()
            response = pb.WatchFleetResponse(instances=_instances(term))
            changed = term.roster.changed.next_change()
            yield response
            await changed.wait()

    async def Pause(self, request: pb.PauseRequest, context: Context) -> pb.PauseResponse:
        paused = await self._call_each(
            request.instance_ids, "PauseEngine", generation_pb2.PauseEngineRequest(), MemberState.PAUSED
        )
        return pb.PauseResponse(instance_ids=paused)

    async def Resume(self, request: pb.ResumeRequest, context: Context) -> pb.ResumeResponse:
        resumed = await self._call_each(
            request.instance_ids, "ResumeEngine", generation_pb2.ResumeEngineRequest(), MemberState.SERVING
        )
        self._term().placer.pump_soon()
        return pb.ResumeResponse(instance_ids=resumed)

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        term = self._term()
        (connection,) = _connections(term, [request.instance_id])
        # Report first, so that samples that it hands over do not return to it.
        _report(term, connection, MemberState.DRAINING)
        try:
            reply = await _call(
                connection, "DrainEngine", generation_pb2.DrainEngineRequest(), context.time_remaining()
            )
        except ServiceError:
            _report(term, connection, MemberState.SERVING)
            raise
        return pb.DrainResponse(handed_over=reply.handed_over)

    async def _call_each(
        self, instance_ids: Sequence[str], method: str, request: Message, state: MemberState
    ) -> list[str]:
        """Call the instances named, or all, one after the other, and report their new state."""
        term = self._term()
        wanted = _connections(term, instance_ids)
        for connection in wanted:
            await _call(connection, method, request, _CALL_SECONDS)
            _report(term, connection, state)
        return [each.instance_id for each in wanted]

    # Knobs and decisions -------------------------------------------------------------------------------

    async def GetKnobs(self, request: pb.GetKnobsRequest, context: Context) -> pb.GetKnobsResponse:
        query = policy_pb2.GetKnobsRequest(**fields_of(request, "run_id", "model", "pool"))
        answer = await self._call_leader(POLICY, "GetKnobs", query, _CALL_SECONDS)
        return pb.GetKnobsResponse(
            **fields_of(answer, "revision", "knobs", "effective", "pending_instance_ids")
        )

    async def SetKnobs(self, request: pb.SetKnobsRequest, context: Context) -> pb.SetKnobsResponse:
        named = fields_of(request, "run_id", "model", "pool", "revision", "knobs")
        change = policy_pb2.SetKnobsRequest(**named)
        answer = await self._call_leader(POLICY, "SetKnobs", change, _CALL_SECONDS)
        return pb.SetKnobsResponse(
            revision=answer.revision, applied_instance_ids=answer.applied, pending_instance_ids=answer.pending
        )

    async def WatchDecisions(
        self, request: pb.WatchDecisionsRequest, context: Context
    ) -> AsyncIterator[pb.WatchDecisionsResponse]:
        if violations := check_watch(request):
            raise InvalidArgument(violations)
        now = 0.0 if request.kept else time.time()
        since = seconds_of(request.since) if request.HasField("since") else now
        # The id of an entry is its time of arrival in milliseconds, slightly after the time of the decision.
        after = str(max(0, int(since * 1000) - 1))
        read = self._decisions.kept if request.kept else self._decisions.follow
        try:
            async for decision in read(after, request.run_id):
                if decision.time >= since and may_see(decision.run_id):
                    yield _decision_message(decision)
        except OUTAGES as error:
            raise Unavailable(f"the decision log cannot be read: {error}") from error

    # Online drafter ------------------------------------------------------------------------------------

    async def GetDrafter(self, request: pb.GetDrafterRequest, context: Context) -> pb.GetDrafterResponse:
        query = drafter_pb2.GetLearnerRequest()
        answer = await self._call_leader(LEARNER, "GetLearner", query, _CALL_SECONDS)
        response = pb.GetDrafterResponse(
            acceptance_length=answer.current_acceptance_length, **fields_of(answer, *_LEARNED)
        )
        if answer.HasField("published_at"):
            response.published_at.CopyFrom(answer.published_at)
        return response

    async def RollBackDrafter(
        self, request: pb.RollBackDrafterRequest, context: Context
    ) -> pb.RollBackDrafterResponse:
        order = drafter_pb2.RollBackRequest(reason=request.reason, drafter_version=request.drafter_version)
        answer = await self._call_leader(LEARNER, "RollBack", order, _ROLLBACK_SECONDS)
        return pb.RollBackDrafterResponse(drafter_version=answer.drafter_version)

    # Leaders of other services -------------------------------------------------------------------------

    async def _call_leader(self, service: str, method: str, request: Message, seconds: float) -> Any:
        """Return the answer of a service's leader. It is looked up for each call, since such calls are rare.

        Raises:
            Unavailable: no leader is known, or it cannot be called.
            ServiceError: it refused, with its code and details.
        """
        make_stub, setting = _LEADERS[service]
        record = await self._find_leader(service, setting)
        try:
            async with open_channel(record.address, self._config) as channel:
                return await getattr(make_stub(channel), method)(request, timeout=seconds)
        except ValueError as error:
            # The token must not be sent to this address.
            raise Unavailable(f"the {service} service cannot be called: {error}") from error
        except grpc.aio.AioRpcError as error:
            raise received_error(error) from error

    async def _find_leader(self, service: str, setting: str) -> InstanceRecord:
        try:
            records = await self._registry.list(service)
        except OUTAGES as error:
            raise Unavailable(f"the {service} service cannot be looked up: {error}") from error
        leaders = [record for record in records.values() if record.state == LEADING]
        if not leaders:
            raise Unavailable(f"no {service} service is running; instances keep the {setting} that they have")
        return max(leaders, key=lambda each: (each.registered_at, each.instance_id))


def _instances(term: LeadershipTerm) -> list[pb.Instance]:
    return [instance_message(member) for _, member in sorted(term.fleet.members.items())]


def _connections(term: LeadershipTerm, instance_ids: Sequence[str]) -> list[Connection]:
    """Return the connections named, or all. NotFound if one is missing."""
    wanted = instance_ids or sorted(term.roster.connections)
    for instance_id in wanted:
        if instance_id not in term.roster.connections:
            raise NotFound("instance", instance_id)
    return [term.roster.connections[instance_id] for instance_id in wanted]


def _report(term: LeadershipTerm, connection: Connection, state: MemberState) -> None:
    term.fleet.report(connection.instance_id, state, asyncio.get_running_loop().time())
    term.roster.notify()


async def _call(connection: Connection, method: str, request: Message, seconds: float | None) -> Any:
    try:
        return await within(connection, getattr(connection.stub, method)(request, timeout=seconds))
    except ConnectionBroken as error:
        raise Unavailable(str(error)) from error
    except grpc.aio.AioRpcError as error:
        message = f"{connection.instance_id}: {error.details()}"
        if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
            raise Unavailable(message) from error
        raise ServiceError(message, code=error.code()) from error


def _decision_message(decision: DecisionRecord) -> pb.WatchDecisionsResponse:
    shared = fields_of(decision, "kind", "reason", "predicted_gain", "run_id")
    response = pb.WatchDecisionsResponse(**shared)
    response.time.FromNanoseconds(int(decision.time * 1e9))
    json_format.ParseDict(dict(decision.details), response.details)
    return response
