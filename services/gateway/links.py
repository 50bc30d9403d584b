"""One work stream to one instance: items and aborts out, tokens in."""

import asyncio
from collections.abc import AsyncIterator, Callable, Hashable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

from paceline.internal.v1 import generation_pb2, generation_pb2_grpc
from services.gateway.batch import Batch
from services.gateway.placement import Slots
from services.platform.tracing import NO_SPAN, Span

# Tokens and items in one message: far below the size limit of messages.
_MOST_TOKENS = 1_000_000
_MOST_ITEMS = 1024


@dataclass(slots=True)
class Held:
    """A sample on the instance, under this attempt; what it was counted as when it was placed."""

    batch: Batch
    index: int
    attempt: int
    prompt: Hashable
    predicted: float
    # This attempt.
    trace: Span = NO_SPAN
    # Of a sample that came to the instance by a move and is claimed there.
    migration_id: str = ""


class WorkLink:
    """The gateway's end of a work stream. `slots` counts what the instance has and can still take.

    `give`, `claim` and `abort` only note what is to be sent; all that is noted when the stream can take it goes
    out in one message. `responded` is called with every message, in order. `run` ends when the stream
    does: with grpc.aio.AioRpcError, or returning when the instance ended it without an error.
    """

    def __init__(
        self,
        instance_id: str,
        epoch: int,
        slots: Slots,
        stub: generation_pb2_grpc.GenerationServiceStub,
        responded: Callable[["WorkLink", generation_pb2.WorkResponse], None],
    ) -> None:
        self.instance_id = instance_id
        self.epoch = epoch
        self.slots = slots
        self.held: dict[int, Held] = {}
        # Loop time until which nothing is given to an instance that has just refused.
        self.closed_until = 0.0
        self.refusals = 0
        self._stub: Any = stub
        self._responded = responded
        self._handles = count(1)
        self._starts: list[generation_pb2.WorkItem] = []
        self._claims: list[generation_pb2.Claim] = []
        self._aborts: list[int] = []
        self._wake = asyncio.Event()
        self._over = False

    def next_handle(self) -> int:
        """A number for the next item, unique on this stream."""
        return next(self._handles)

    def give(self, held: Held, item: generation_pb2.WorkItem) -> None:
        """Sends an item. Its slot must have been taken by the placement."""
        self.held[item.handle] = held
        self._starts.append(item)
        self._wake.set()

    def claim(self, held: Held, handle: int) -> None:
        """Takes over a sample that was moved to the instance, and takes a slot for it."""
        self.held[handle] = held
        self.slots.take(held.prompt, held.predicted)
        self._claims.append(generation_pb2.Claim(handle=handle, migration_id=held.migration_id))
        self._wake.set()

    def abort(self, handle: int) -> None:
        """Asks the instance to end a sample; it answers with a Finished."""
        self._aborts.append(handle)
        self._wake.set()

    def release(self, handle: int) -> Held | None:
        """The instance is done with a sample: its slot is free. None when the handle is not known."""
        held = self.held.pop(handle, None)
        if held is not None:
            self.slots.give_back(held.prompt, held.predicted)
        return held

    async def run(self) -> None:
        """Carries messages both ways until the stream ends."""
        call = self._stub.Work(self._requests())
        try:
            async for response in call:
                self._responded(self, response)
        finally:
            call.cancel()
            # The requests end too: grpc waits for the next one for ever.
            self._over = True
            self._wake.set()

    async def _requests(self) -> AsyncIterator[generation_pb2.WorkRequest]:
        while True:
            await self._wake.wait()
            if self._over:
                return
            self._wake.clear()
            for request in self._drain():
                yield request

    def _drain(self) -> Iterator[generation_pb2.WorkRequest]:
        starts, self._starts = self._starts, []
        claims, self._claims = self._claims, []
        aborts, self._aborts = self._aborts, []
        if claims:
            # Before the aborts, which may be of these.
            yield generation_pb2.WorkRequest(claim=claims)
        request, tokens = generation_pb2.WorkRequest(), 0
        for item in starts:
            request.start.append(item)
            tokens += len(item.prompt_token_ids) + len(item.prefix_token_ids)
            if tokens > _MOST_TOKENS or len(request.start) == _MOST_ITEMS:
                yield request
                request, tokens = generation_pb2.WorkRequest(), 0
        request.abort.extend(aborts)
        if request.start or request.abort:
            yield request
