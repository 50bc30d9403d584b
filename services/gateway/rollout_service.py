"""RolloutService as gRPC sees it."""

from collections.abc import AsyncIterator, Callable

import grpc

from paceline.v1 import rollout_pb2, rollout_pb2_grpc
from services.gateway.metrics import GatewayMetrics
from services.gateway.term import Term

Context = grpc.aio.ServicerContext


class RolloutServicer(rollout_pb2_grpc.RolloutServiceServicer):
    """`term` gives the current term of leadership, or raises Unavailable."""

    def __init__(self, term: Callable[[], Term], metrics: GatewayMetrics) -> None:
        self._term = term
        self._metrics = metrics

    async def SubmitRollouts(
        self, request: rollout_pb2.SubmitRolloutsRequest, context: Context
    ) -> rollout_pb2.SubmitRolloutsResponse:
        return await self._term().rollouts.submit(request)

    async def StreamRollouts(
        self, request: rollout_pb2.StreamRolloutsRequest, context: Context
    ) -> AsyncIterator[rollout_pb2.StreamRolloutsResponse]:
        with self._metrics.streams.track_inprogress():
            key = (request.run_id, request.batch_id)
            async for response in self._term().rollouts.follow(key, request.cursor):
                yield response

    async def Generate(
        self, request: rollout_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[rollout_pb2.GenerateResponse]:
        with self._metrics.streams.track_inprogress():
            async for response in self._term().rollouts.generate(request):
                yield response

    async def CancelRollouts(
        self, request: rollout_pb2.CancelRolloutsRequest, context: Context
    ) -> rollout_pb2.CancelRolloutsResponse:
        cancelled = await self._term().rollouts.cancel(request)
        return rollout_pb2.CancelRolloutsResponse(cancelled=cancelled)

    async def HintNextBatch(
        self, request: rollout_pb2.HintNextBatchRequest, context: Context
    ) -> rollout_pb2.HintNextBatchResponse:
        samples = await self._term().rollouts.hint(request)
        return rollout_pb2.HintNextBatchResponse(samples=samples)

    async def ReportRewards(
        self, request: rollout_pb2.ReportRewardsRequest, context: Context
    ) -> rollout_pb2.ReportRewardsResponse:
        matched = await self._term().rewards.report(request)
        return rollout_pb2.ReportRewardsResponse(matched=matched)
