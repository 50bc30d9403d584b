"""DemandService as gRPC sees it: what there is to do, for those who decide how many instances there should be."""

import time
from collections.abc import Callable

import grpc

from paceline.internal.v1 import demand_pb2, demand_pb2_grpc
from services.gateway.batch import Phase
from services.gateway.fleet import Member
from services.gateway.fleet_service import STATES
from services.gateway.running import Running
from services.gateway.term import Term


class DemandServicer(demand_pb2_grpc.DemandServiceServicer):
    """`term` gives the current term of leadership, or raises Unavailable."""

    def __init__(self, term: Callable[[], Term]) -> None:
        self._term = term

    async def GetDemand(
        self, request: demand_pb2.GetDemandRequest, context: grpc.aio.ServicerContext
    ) -> demand_pb2.GetDemandResponse:
        term = self._term()
        response = demand_pb2.GetDemandResponse()
        now = time.time()
        for running in list(term.dispatcher.batches.values()):
            _add(response, running, term, now)
        for instance_id, member in sorted(term.fleet.members.items()):
            link = term.dispatcher.links.get(instance_id)
            response.instances.append(_instance(member, 0 if link is None else len(link.held)))
        return response


def _add(response: demand_pb2.GetDemandResponse, running: Running, term: Term, now: float) -> None:
    tokens = 0.0
    for sample in running.batch.remaining():
        left = term.dispatcher.work_left(running, sample.index)
        tokens += left
        if sample.phase is Phase.WAITING:
            response.waiting_samples += 1
            response.waiting_tokens += left
        else:
            response.running_samples += 1
            response.running_tokens += left
    response.batches.add(seconds_left=running.batch.deadline_at - now, tokens_left=tokens)


def _instance(member: Member, running: int) -> demand_pb2.InstanceDemand:
    record = member.record
    return demand_pb2.InstanceDemand(
        instance_id=record.instance_id,
        epoch=record.epoch,
        state=STATES[member.state],
        running=running,
        max_running=record.max_running,
        generated_tokens=int(member.load.get("generated_tokens", 0)),
    )
