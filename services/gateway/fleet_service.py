"""FleetService as gRPC sees it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
from google.protobuf.message import Message

from paceline.internal.v1 import generation_pb2
from paceline.v1 import fleet_pb2, fleet_pb2_grpc
from services.gateway.assemble import timestamp
from services.gateway.drafter import DrafterFront
from services.gateway.fleet import Member, State
from services.gateway.policy import PolicyFront
from services.gateway.roster import Connection, ConnectionBroken, within
from services.gateway.term import Term
from services.platform.errors import NotFound, ServiceError, Unavailable

Context = grpc.aio.ServicerContext

STATES = {
    State.STALE: fleet_pb2.INSTANCE_STATE_STALE,
    State.SERVING: fleet_pb2.INSTANCE_STATE_SERVING,
    State.PAUSED: fleet_pb2.INSTANCE_STATE_PAUSED,
    State.DRAINING: fleet_pb2.INSTANCE_STATE_DRAINING,
    State.DEAD: fleet_pb2.INSTANCE_STATE_DEAD,
}
_CALL_SECONDS = 5.0


class FleetServicer(fleet_pb2_grpc.FleetServiceServicer):
    """`term` gives the current term of leadership, or raises Unavailable. `policy` and `drafter` need none:
    whichever gateway is asked passes it on."""

    def __init__(self, term: Callable[[], Term], policy: PolicyFront, drafter: DrafterFront) -> None:
        self._term = term
        self._policy = policy
        self._drafter = drafter

    async def ListInstances(
        self, request: fleet_pb2.ListInstancesRequest, context: Context
    ) -> fleet_pb2.ListInstancesResponse:
        return fleet_pb2.ListInstancesResponse(instances=_instances(self._term()))

    async def WatchFleet(
        self, request: fleet_pb2.WatchFleetRequest, context: Context
    ) -> AsyncIterator[fleet_pb2.WatchFleetResponse]:
        while True:
            term = self._term()
            response = fleet_pb2.WatchFleetResponse(instances=_instances(term))
            changed = term.roster.changed.mark()
            yield response
            await changed.wait()

    async def Pause(self, request: fleet_pb2.PauseRequest, context: Context) -> fleet_pb2.PauseResponse:
        term = self._term()
        wanted = _connections(term, request.instance_ids)
        for connection in wanted:
            await _call(connection, "PauseEngine", generation_pb2.PauseEngineRequest(), _CALL_SECONDS)
            self._report(term, connection, State.PAUSED)
        return fleet_pb2.PauseResponse(instance_ids=[each.instance_id for each in wanted])

    async def Resume(self, request: fleet_pb2.ResumeRequest, context: Context) -> fleet_pb2.ResumeResponse:
        term = self._term()
        wanted = _connections(term, request.instance_ids)
        for connection in wanted:
            await _call(connection, "ResumeEngine", generation_pb2.ResumeEngineRequest(), _CALL_SECONDS)
            self._report(term, connection, State.SERVING)
        term.dispatcher.pump_soon()
        return fleet_pb2.ResumeResponse(instance_ids=[each.instance_id for each in wanted])

    async def Drain(self, request: fleet_pb2.DrainRequest, context: Context) -> fleet_pb2.DrainResponse:
        term = self._term()
        (connection,) = _connections(term, [request.instance_id])
        # Said first, so that nothing it hands over comes back to it.
        self._report(term, connection, State.DRAINING)
        try:
            reply = await _call(
                connection, "DrainEngine", generation_pb2.DrainEngineRequest(), context.time_remaining()
            )
        except ServiceError:
            self._report(term, connection, State.SERVING)
            raise
        return fleet_pb2.DrainResponse(handed_over=reply.handed_over)

    async def GetPolicy(
        self, request: fleet_pb2.GetPolicyRequest, context: Context
    ) -> fleet_pb2.GetPolicyResponse:
        return await self._policy.get(request)

    async def SetPolicy(
        self, request: fleet_pb2.SetPolicyRequest, context: Context
    ) -> fleet_pb2.SetPolicyResponse:
        return await self._policy.set(request)

    async def WatchDecisions(
        self, request: fleet_pb2.WatchDecisionsRequest, context: Context
    ) -> AsyncIterator[fleet_pb2.WatchDecisionsResponse]:
        async for decision in self._policy.watch(request):
            yield decision

    async def GetDrafter(
        self, request: fleet_pb2.GetDrafterRequest, context: Context
    ) -> fleet_pb2.GetDrafterResponse:
        return await self._drafter.get()

    async def RollBackDrafter(
        self, request: fleet_pb2.RollBackDrafterRequest, context: Context
    ) -> fleet_pb2.RollBackDrafterResponse:
        return await self._drafter.roll_back(request)

    def _report(self, term: Term, connection: Connection, state: State) -> None:
        term.fleet.report(connection.instance_id, state, asyncio.get_running_loop().time())
        term.roster.notify()


def _connections(term: Term, instance_ids: Sequence[str]) -> list[Connection]:
    """The connections named, or all. NotFound for one that is not there."""
    wanted = instance_ids or sorted(term.roster.connections)
    for instance_id in wanted:
        if instance_id not in term.roster.connections:
            raise NotFound("instance", instance_id)
    return [term.roster.connections[instance_id] for instance_id in wanted]


async def _call(connection: Connection, method: str, request: Message, seconds: float | None) -> Any:
    try:
        return await within(connection, getattr(connection.stub, method)(request, timeout=seconds))
    except ConnectionBroken as error:
        raise Unavailable(str(error)) from error
    except grpc.aio.AioRpcError as error:
        message = f"{connection.instance_id}: {error.details()}"
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            raise Unavailable(message) from error
        raise ServiceError(message, code=error.code()) from error


def _instances(term: Term) -> list[fleet_pb2.Instance]:
    return [_instance(member) for _, member in sorted(term.fleet.members.items())]


def _instance(member: Member) -> fleet_pb2.Instance:
    record, load = member.record, member.load
    return fleet_pb2.Instance(
        instance_id=record.instance_id,
        epoch=record.epoch,
        address=record.address,
        state=STATES[member.state],
        policy_version=member.version,
        load=fleet_pb2.InstanceLoad(
            running=int(load.get("running", 0)),
            waiting=int(load.get("waiting", 0)),
            kv_usage=load.get("kv_usage", 0.0),
            step_seconds=load.get("step_seconds", 0.0),
            generated_tokens=int(load.get("generated_tokens", 0)),
            steps=int(load.get("steps", 0)),
        ),
        max_running=record.max_running,
        max_model_len=record.max_model_len,
        vocab_size=record.vocab_size,
        model=record.model,
        device=record.device,
        registered_at=timestamp(record.registered_at),
        metrics_address=record.metrics_address,
    )
