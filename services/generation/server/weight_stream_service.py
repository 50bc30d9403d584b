"""Servicers for the bytes of weights: a trainer pushes them, and other instances fetch them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc

from paceline.errors import Violation
from paceline.internal.v1 import weight_peer_pb2 as peer_pb
from paceline.internal.v1 import weight_peer_pb2_grpc as peer_rpc
from paceline.v1 import weight_stream_pb2 as pb
from paceline.v1 import weight_stream_pb2_grpc as rpc
from services.contracts.errors import InvalidArgument, Unavailable
from services.generation.weights.stream.metrics import INSTANCE, TRAINER
from services.generation.weights.stream.reception import Reception, StreamFollower, StreamLimits
from services.generation.weights.stream.stored_stream import StoredStream
from services.generation.weights.stream.streams import WeightStreams
from services.platform.security.guard import bearer_token
from services.platform.tasks import end


async def outgoing(
    stream: StoredStream, position: int, reception: Reception | None, limits: StreamLimits
) -> AsyncIterator[peer_pb.FetchWeightsResponse]:
    """Yield a stream from a position on, and empty messages at intervals while no more bytes have arrived.

    More bytes arrive at the `reception`, if there is one.

    Raises:
        Unavailable: no more bytes will arrive, or the files were removed.
        WeightsRefused: the weights were refused here.
    """
    while True:
        if reception is not None and reception.refused is not None:
            raise reception.refused
        coming = None if reception is None else reception.changed.next_change()
        if position < stream.log.end:
            try:
                piece = await asyncio.to_thread(stream.read, position, limits.piece_bytes)
            except OSError as error:
                if reception is not None and reception.refused is not None:
                    raise reception.refused from error
                raise Unavailable(f"the weights are not here any more: {error}") from error
            position += len(piece.data)
            yield peer_pb.FetchWeightsResponse(piece=piece, available=stream.log.end)
        elif stream.whole or coming is None or reception is None:
            return
        elif reception.done.done():
            raise Unavailable("the weights do not come any more")
        else:
            try:
                await asyncio.wait_for(coming.wait(), limits.stall_seconds / 3)
            except TimeoutError:
                yield peer_pb.FetchWeightsResponse(available=stream.log.end)


Context = grpc.aio.ServicerContext[Any, Any]


class WeightStreamService(rpc.WeightStreamServiceServicer):
    """Servicer that receives the bytes that a trainer pushes, for the update of its ticket."""

    def __init__(self, streams: WeightStreams) -> None:
        self._streams = streams

    async def PushWeights(
        self, request_iterator: AsyncIterator[pb.PushWeightsRequest], context: Context
    ) -> AsyncIterator[pb.PushWeightsResponse]:
        """Receive bytes, and report how many have arrived."""
        metadata = {key: value for key, value in context.invocation_metadata() or ()}
        reception = self._streams.ticketed(bearer_token(str(metadata.get("authorization", ""))))
        reader = asyncio.create_task(_take(reception, request_iterator))
        tasks: list[asyncio.Task[Any]] = [reader]
        reported = None
        try:
            while True:
                coming = asyncio.create_task(reception.changed.next_change().wait())
                tasks[1:] = [coming]
                if over := reader.done():
                    await reader
                    reception.check()
                state = (reception.stream.log.end, reception.confirmed)
                if state != reported:
                    yield pb.PushWeightsResponse(received=state[0], confirmed=state[1])
                    reported = state
                if over and state[0] == state[1]:
                    return
                # The confirmed position may also change with time.
                await asyncio.wait(
                    {coming} if over else {coming, reader},
                    timeout=self._streams.limits.stall_seconds / 4,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                coming.cancel()
        finally:
            await end(tasks)


async def _take(reception: Reception, requests: AsyncIterator[pb.PushWeightsRequest]) -> None:
    async for request in requests:
        await reception.take(request.piece, TRAINER)


class WeightPeerService(peer_rpc.WeightPeerServiceServicer):
    """Servicer of the weights that an instance has or is receiving."""

    def __init__(self, streams: WeightStreams) -> None:
        self._streams = streams

    async def FetchWeights(
        self, request_iterator: AsyncIterator[peer_pb.FetchWeightsRequest], context: Context
    ) -> AsyncIterator[peer_pb.FetchWeightsResponse]:
        """Send bytes from a position on."""
        requests = aiter(request_iterator)
        first = await anext(requests)
        stream, reception = await self._streams.wanted(first)
        if first.position > stream.log.end and (reception is None or stream.whole):
            raise InvalidArgument(
                [Violation("position", f"is {first.position}; the end is {stream.log.end}")]
            )
        follower = None if reception is None else reception.followers.join(first.position, time.monotonic())
        reader = asyncio.create_task(_acknowledge(reception, follower, requests))
        sent = self._streams.metrics.sent.labels(INSTANCE)
        try:
            async for answer in outgoing(stream, first.position, reception, self._streams.limits):
                sent.inc(len(answer.piece.data))
                yield answer
            # The other side still has to acknowledge the last bytes.
            with suppress(TimeoutError, grpc.RpcError):
                await asyncio.wait_for(asyncio.shield(reader), self._streams.limits.stall_seconds)
        finally:
            await end([reader])
            if reception is not None and follower is not None:
                reception.followers.leave(follower)


async def _acknowledge(
    reception: Reception | None,
    follower: StreamFollower | None,
    requests: AsyncIterator[peer_pb.FetchWeightsRequest],
) -> None:
    async for request in requests:
        if reception is not None and follower is not None:
            reception.followers.acknowledge(follower, request.position, time.monotonic())
            reception.changed.notify()
