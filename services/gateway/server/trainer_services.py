"""gRPC servicers of RolloutService and WeightService."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc

from paceline.errors import Violation
from paceline.internal.v1.rollout_event_pb2 import SerializedEvent
from paceline.v1 import rollout_pb2 as pb
from paceline.v1 import rollout_pb2_grpc, weight_pb2, weight_pb2_grpc
from services.contracts.errors import InvalidArgument, Unimplemented
from services.gateway.instances.staging import DISK, TRANSPORTS, check_requested
from services.gateway.metrics import GatewayMetrics
from services.gateway.state.update_book import InFlightTreatment
from services.gateway.term import LeadershipTerm

Context = grpc.aio.ServicerContext

_TREATMENTS = {
    weight_pb2.IN_FLIGHT_UNSPECIFIED: InFlightTreatment.REFUSE,
    weight_pb2.IN_FLIGHT_REFUSE: InFlightTreatment.REFUSE,
    weight_pb2.IN_FLIGHT_ABORT: InFlightTreatment.ABORT,
    weight_pb2.IN_FLIGHT_CONTINUE: InFlightTreatment.CONTINUE,
    weight_pb2.IN_FLIGHT_KEEP_KV: InFlightTreatment.KEEP_KV,
}


class RolloutServicer(rollout_pb2_grpc.RolloutServiceServicer):
    """Servicer for the term of leadership that `term` returns.

    `term` raises Unavailable while another gateway leads.
    """

    def __init__(self, term: Callable[[], LeadershipTerm], metrics: GatewayMetrics) -> None:
        self._term = term
        self._metrics = metrics

    async def SubmitRollouts(
        self, request: pb.SubmitRolloutsRequest, context: Context
    ) -> pb.SubmitRolloutsResponse:
        return await self._term().submissions.submit(request)

    async def OpenBatch(self, request: pb.OpenBatchRequest, context: Context) -> pb.OpenBatchResponse:
        return await self._term().submissions.open(request)

    async def AddSamples(self, request: pb.AddSamplesRequest, context: Context) -> pb.AddSamplesResponse:
        return await self._term().open_batches.add(request)

    async def CloseBatch(self, request: pb.CloseBatchRequest, context: Context) -> pb.CloseBatchResponse:
        return await self._term().open_batches.close((request.run_id, request.batch_id))

    async def ContinueSamples(
        self, request: pb.ContinueSamplesRequest, context: Context
    ) -> pb.ContinueSamplesResponse:
        return await self._term().tool_calls.resume(request)

    async def StreamRollouts(
        self, request: pb.StreamRolloutsRequest, context: Context
    ) -> AsyncIterator[SerializedEvent]:
        # gRPC serialises any message.
        with self._metrics.streams.track_inprogress():
            async for response in self._term().delivery.stream(request):
                yield response

    async def AckRollouts(self, request: pb.AckRolloutsRequest, context: Context) -> pb.AckRolloutsResponse:
        key = (request.run_id, request.batch_id)
        trimmed = await self._term().delivery.acknowledge(key, request.cursor)
        return pb.AckRolloutsResponse(trimmed=trimmed)

    async def Generate(
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        with self._metrics.streams.track_inprogress():
            async for response in self._term().delivery.generate(request):
                yield response

    async def CancelRollouts(
        self, request: pb.CancelRolloutsRequest, context: Context
    ) -> pb.CancelRolloutsResponse:
        cancelled = await self._term().submissions.cancel(request)
        return pb.CancelRolloutsResponse(cancelled=cancelled)

    async def HintNextBatch(
        self, request: pb.HintNextBatchRequest, context: Context
    ) -> pb.HintNextBatchResponse:
        samples = await self._term().submissions.hint(request)
        return pb.HintNextBatchResponse(samples=samples)

    async def ReportRewards(
        self, request: pb.ReportRewardsRequest, context: Context
    ) -> pb.ReportRewardsResponse:
        matched = await self._term().reports.report(request)
        return pb.ReportRewardsResponse(matched=matched)

    async def GetBatch(self, request: pb.GetBatchRequest, context: Context) -> pb.GetBatchResponse:
        return pb.GetBatchResponse(batch=await self._term().runs.get((request.run_id, request.batch_id)))

    async def ListBatches(self, request: pb.ListBatchesRequest, context: Context) -> pb.ListBatchesResponse:
        return self._term().runs.list(request)

    async def EndRun(self, request: pb.EndRunRequest, context: Context) -> pb.EndRunResponse:
        return await self._term().runs.end(request.run_id)


class WeightServicer(weight_pb2_grpc.WeightServiceServicer):
    """Servicer for the term of leadership that `term` returns.

    `term` raises Unavailable while another gateway leads. Weights must be in `weights_root`, if that is set.
    """

    def __init__(self, term: Callable[[], LeadershipTerm], weights_root: Path | None = None) -> None:
        self._term = term
        self._weights_root = weights_root

    async def StartUpdate(
        self, request: weight_pb2.StartUpdateRequest, context: Context
    ) -> weight_pb2.StartUpdateResponse:
        _check_start(request)
        pushed = TRANSPORTS[request.transport].pushed
        updater = self._term().updater
        update = await updater.start(request.run_id, request.policy_version, request.push_id, streamed=pushed)
        return weight_pb2.StartUpdateResponse(
            update_id=update.update_id,
            policy_version=updater.book.version or 0,
            stream=await updater.stream_target(update.update_id) if pushed else None,
        )

    async def UpdateWeights(
        self, request_iterator: AsyncIterator[weight_pb2.UpdateWeightsRequest], context: Context
    ) -> weight_pb2.UpdateWeightsResponse:
        term, update_id, named = self._term(), "", None
        async for request in request_iterator:
            update_id = update_id or request.update_id
            if request.WhichOneof("source") == "chunk":
                raise InvalidArgument([Violation("chunk", "is set; weights are pushed to an instance")])
            if named is not None:
                raise InvalidArgument([Violation("source", "was sent twice; one message names the weights")])
            named = request
        named = named or weight_pb2.UpdateWeightsRequest()
        field = named.WhichOneof("source") or DISK.source
        transport = next(each for each in TRANSPORTS.values() if each.source == field)
        source = getattr(named, field)
        transport.check(source, self._weights_root)
        staged = await term.updater.stage(update_id, source)
        return weight_pb2.UpdateWeightsResponse(instances=staged)

    async def FinishUpdate(
        self, request: weight_pb2.FinishUpdateRequest, context: Context
    ) -> weight_pb2.FinishUpdateResponse:
        treatment = _treatment(request.in_flight)
        term = self._term()
        finished = await term.updater.finish(request.update_id, treatment)
        return weight_pb2.FinishUpdateResponse(
            policy_version=term.updater.book.version or 0,
            drafter_version=term.drafter_version,
            instances=finished.instances,
            aborted_samples=finished.aborted,
            continued_samples=finished.continued,
        )

    async def AbortUpdate(
        self, request: weight_pb2.AbortUpdateRequest, context: Context
    ) -> weight_pb2.AbortUpdateResponse:
        updater = self._term().updater
        await updater.abort(request.update_id)
        return weight_pb2.AbortUpdateResponse(policy_version=updater.book.version or 0)

    async def GetVersions(
        self, request: weight_pb2.GetVersionsRequest, context: Context
    ) -> weight_pb2.GetVersionsResponse:
        term = self._term()
        published, active = term.book.published, term.book.active
        return weight_pb2.GetVersionsResponse(
            policy_version=published.version if published else 0,
            policy_path=published.path if published else "",
            policy_checksum=published.checksum if published else "",
            drafter_version=term.drafter_version,
            update_id=active.update_id if active else "",
            instances=[
                weight_pb2.InstanceUpdate(
                    instance_id=member.instance_id,
                    applied=published is not None and member.version == published.version,
                    policy_version=member.version,
                    error=member.reason,
                )
                for _, member in sorted(term.fleet.members.items())
            ],
        )


def _treatment(in_flight: weight_pb2.InFlight) -> InFlightTreatment:
    treatment = _TREATMENTS.get(in_flight)
    if treatment is None:
        found = f"is {in_flight}; must be REFUSE, ABORT, CONTINUE or KEEP_KV"
        raise InvalidArgument([Violation("in_flight", found)])
    return treatment


def _check_start(request: weight_pb2.StartUpdateRequest) -> None:
    if request.target == weight_pb2.WEIGHT_TARGET_DRAFTER:
        raise Unimplemented("DRAFTER", "drafters from trainers are not supported yet; target POLICY")
    violations = check_requested(request.transport)
    if not request.run_id:
        violations.append(Violation("run_id", "is empty"))
    if request.target != weight_pb2.WEIGHT_TARGET_POLICY:
        violations.append(Violation("target", f"is {request.target}; must be POLICY or DRAFTER"))
    if violations:
        raise InvalidArgument(violations)
