"""Bytes of a version on their way to another instance."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from paceline.internal.v1 import weight_peer_pb2 as peer_pb
from services.contracts.errors import Unavailable
from services.generation.weights.stream.reception import Reception, StreamLimits
from services.generation.weights.stream.stored_stream import StoredStream


async def outgoing(
    stream: StoredStream, position: int, reception: Reception | None, limits: StreamLimits
) -> AsyncIterator[peer_pb.FetchWeightsResponse]:
    """Yield a stream from a position on, and signs of life while there is no more of it.

    More of it comes to the `reception`, if there is one.

    Raises:
        Unavailable: no more will come, or the files were removed.
        WeightsRefused: they were refused here.
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
