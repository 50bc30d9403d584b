"""WeightService as gRPC sees it."""

from collections.abc import AsyncIterator, Callable

import grpc

from paceline.v1 import weight_pb2, weight_pb2_grpc
from services.gateway.term import Term
from services.platform.errors import InvalidArgument, Unimplemented
from services.platform.violations import Violation

Context = grpc.aio.ServicerContext

_TRANSPORTS = {
    weight_pb2.WEIGHT_TRANSPORT_STREAM: "tensors in the call's stream are not there yet; use DISK",
    weight_pb2.WEIGHT_TRANSPORT_NCCL: "a collective with the trainer is not there yet; use DISK",
}


class WeightServicer(weight_pb2_grpc.WeightServiceServicer):
    """`term` gives the current term of leadership, or raises Unavailable."""

    def __init__(self, term: Callable[[], Term]) -> None:
        self._term = term

    async def StartUpdate(
        self, request: weight_pb2.StartUpdateRequest, context: Context
    ) -> weight_pb2.StartUpdateResponse:
        _check_start(request)
        updater = self._term().updater
        update = await updater.start(request.run_id, request.version)
        return weight_pb2.StartUpdateResponse(
            update_id=update.update_id, current_version=updater.book.version or 0
        )

    async def UpdateWeights(
        self, request_iterator: AsyncIterator[weight_pb2.UpdateWeightsRequest], context: Context
    ) -> weight_pb2.UpdateWeightsResponse:
        term, update_id, disk = self._term(), "", None
        async for request in request_iterator:
            update_id = update_id or request.update_id
            if request.WhichOneof("source") == "chunk":
                raise InvalidArgument([Violation("chunk", "is set; the transport of this update is DISK")])
            if disk is not None:
                raise InvalidArgument([Violation("disk", "was sent twice; one message names the weights")])
            disk = request.disk
        if disk is None or not disk.path.startswith("/"):
            found = disk.path if disk is not None else ""
            raise InvalidArgument([Violation("disk.path", f"is {found!r}; must be an absolute path")])
        return weight_pb2.UpdateWeightsResponse(instances=await term.updater.stage(update_id, disk))

    async def FinishUpdate(
        self, request: weight_pb2.FinishUpdateRequest, context: Context
    ) -> weight_pb2.FinishUpdateResponse:
        updater = self._term().updater
        instances = await updater.finish(request.update_id)
        return weight_pb2.FinishUpdateResponse(version=updater.book.version or 0, instances=instances)

    async def AbortUpdate(
        self, request: weight_pb2.AbortUpdateRequest, context: Context
    ) -> weight_pb2.AbortUpdateResponse:
        updater = self._term().updater
        await updater.abort(request.update_id)
        return weight_pb2.AbortUpdateResponse(current_version=updater.book.version or 0)

    async def GetVersions(
        self, request: weight_pb2.GetVersionsRequest, context: Context
    ) -> weight_pb2.GetVersionsResponse:
        term = self._term()
        published, active = term.book.published, term.book.active
        return weight_pb2.GetVersionsResponse(
            policy_version=published.version if published else 0,
            policy_path=published.path if published else "",
            policy_checksum=published.checksum if published else "",
            drafter_version=term.feed.drafter_version if term.feed is not None else 0,
            update_id=active.update_id if active else "",
            instances=[
                weight_pb2.InstanceUpdate(
                    instance_id=member.instance_id,
                    applied=published is not None and member.version == published.version,
                    version=member.version,
                    error=member.reason,
                )
                for _, member in sorted(term.fleet.members.items())
            ],
        )


def _check_start(request: weight_pb2.StartUpdateRequest) -> None:
    if request.target == weight_pb2.WEIGHT_TARGET_DRAFTER:
        raise Unimplemented("DRAFTER", "drafters from trainers are not there yet; target POLICY")
    if request.transport in _TRANSPORTS:
        name = weight_pb2.WeightTransport.Name(request.transport)
        raise Unimplemented(name, _TRANSPORTS[request.transport])
    violations = []
    if not request.run_id:
        violations.append(Violation("run_id", "is empty"))
    if request.target != weight_pb2.WEIGHT_TARGET_POLICY:
        violations.append(Violation("target", f"is {request.target}; must be POLICY or DRAFTER"))
    if request.transport != weight_pb2.WEIGHT_TRANSPORT_DISK:
        violations.append(Violation("transport", f"is {request.transport}; must be DISK, STREAM or NCCL"))
    if violations:
        raise InvalidArgument(violations)
