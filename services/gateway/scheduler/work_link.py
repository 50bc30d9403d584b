"""Gateway's end of the work stream to one instance: items and aborts out, tokens in."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from paceline.internal.v1 import generation_pb2 as pb
from paceline.internal.v1 import generation_pb2_grpc
from paceline.times import duration
from services.gateway.journal.writer import JournalBacklog
from services.gateway.scheduler.placement import InstanceSlots
from services.gateway.scheduler.turns import Pace
from services.gateway.state.rollout_batch import RolloutBatch
from services.gateway.state.sample import EventEffect, GatewaySample
from services.platform.observability.tracing import NO_SPAN, TraceSpan
from services.platform.tasks import ExponentialBackoff

# Most tokens and items in one message: far below the size limit of messages.
_MOST_TOKENS = 1_000_000
_MOST_ITEMS = 1024
# Target rate of mergeable messages from and to all instances (per second), and the longest time that samples and
# ends wait to be merged. A message costs as much as all other work for a sample.
_MESSAGES = 1000.0
_LONGEST_INTERVAL = 1.0
# Least time between two messages of an instance if nothing waits for the ends in them: the work that a message
# causes in gateway, journal and trainer costs as much as many samples in it.
_PATIENCE = 0.1
# Relative change of the interval that is worth sending to an instance.
_WORTH_SENDING = 0.2
# Most events that are processed at once: an instance with hundreds of samples may hand over all of them.
_MOST_EVENTS = 64


def message_interval(instances: int) -> float:
    """Return the least seconds between two messages on one stream, in each direction, if there are `instances`."""
    return min(instances / _MESSAGES, _LONGEST_INTERVAL)


def report_interval(instances: int, *, patient: bool) -> float:
    """Return the least seconds between two messages from one of `instances` instances.

    `patient`: nothing waits for the ends of single samples.
    """
    return max(message_interval(instances), _PATIENCE if patient else 0.0)


@dataclass(slots=True, eq=False)
class Attempt:
    """One attempt of a sample on an instance.

    `prompt` and `predicted` are the values with which the attempt takes a slot of the instance.
    """

    batch: RolloutBatch
    index: int
    number: int
    prompt: Hashable
    predicted: float
    trace: TraceSpan = NO_SPAN
    # Set if another instance has moved the sample here: the id with which it is claimed.
    migration_id: str = ""

    @property
    def sample(self) -> GatewaySample:
        return self.batch.samples[self.index]

    @property
    def is_running(self) -> bool:
        """Return True if this is the sample's current attempt and it is on the instance."""
        return self.sample.is_running(self.number)

    def lost(self, now: float) -> EventEffect:
        """Record that the instance was lost, or does not have the sample."""
        return self.batch.lost(self.index, self.number, now)


class WorkLink:
    """Work stream to one instance. `slots` counts the samples that the instance has and can still take.

    `give`, `claim` and `abort` only queue; everything queued is sent in one message when the stream can take it.
    Samples wait until `interval()` seconds after the last message, unless the instance has none or the sample is
    streamed to a caller. The instance is asked to merge its reports of `reports()` seconds. `responded` is called
    with every message in order, or with the parts of a long one; while the backlog is paused no messages are read.
    `run` ends with the stream: it raises grpc.aio.AioRpcError, or returns if the instance ended it without an
    error.
    """

    def __init__(
        self,
        instance_id: str,
        epoch: int,
        slots: InstanceSlots,
        refusals: ExponentialBackoff,
        stub: generation_pb2_grpc.GenerationServiceStub,
        responded: Callable[[WorkLink, pb.WorkResponse], None],
        pace: Pace,
        backlog: JournalBacklog,
        interval: Callable[[], float] = lambda: 0.0,
        reports: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.instance_id = instance_id
        self.epoch = epoch
        self.slots = slots
        self.held: dict[int, Attempt] = {}
        # Handles for further items, unique on this stream.
        self.handles = count(1)
        # Loop time until which nothing is given to the instance after a refusal.
        self.closed_until = 0.0
        self.refusals = refusals
        self._stub: Any = stub
        self._responded = responded
        self._pace = pace
        self._backlog = backlog
        self._interval = interval
        self._reports = reports
        # Report interval that the instance was sent, and the loop time of the last message to it.
        self._sent_interval = 0.0
        self._sent_at = -math.inf
        self._waking: asyncio.TimerHandle | None = None
        self._starts: list[pb.WorkItem] = []
        self._claims: list[pb.Claim] = []
        self._aborts: list[int] = []
        self._wake = asyncio.Event()
        self._over = False

    def give(self, attempt: Attempt, item: pb.WorkItem) -> None:
        """Send an item. The placement must have taken its slot."""
        idle = not self.held
        self.held[item.handle] = attempt
        self._starts.append(item)
        if idle or item.streamed:
            self._wake.set()
        elif self._waking is None and not self._wake.is_set():
            loop = asyncio.get_running_loop()
            self._waking = loop.call_at(self._sent_at + self._interval(), self._wake.set)

    def claim(self, attempt: Attempt, handle: int) -> None:
        """Claim a sample that was moved to the instance, and take a slot for it."""
        self.held[handle] = attempt
        self.slots.take(attempt.prompt, attempt.predicted)
        self._claims.append(pb.Claim(handle=handle, migration_id=attempt.migration_id))
        self._wake.set()

    def abort(self, handle: int) -> None:
        """Ask the instance to end a sample; it answers with Finished."""
        self._aborts.append(handle)
        self._wake.set()

    def release(self, handle: int) -> Attempt | None:
        """Free the slot of a sample that has left the instance; return None if the handle is not known."""
        attempt = self.held.pop(handle, None)
        if attempt is not None:
            self.slots.give_back(attempt.prompt, attempt.predicted)
        return attempt

    def lose(self) -> list[Attempt]:
        """Give up all samples, since the stream has ended; return their attempts."""
        held, self.held = self.held, {}
        return list(held.values())

    async def run(self) -> None:
        """Send and receive messages until the stream ends."""
        call = self._stub.Work(self._requests())
        try:
            async for response in call:
                for part in _parts(response):
                    await self._pace.wait()
                    while self._backlog.paused:
                        await self._backlog.changed.wait()
                        await self._pace.wait()
                    self._responded(self, part)
        finally:
            call.cancel()
            # The requests must end too: grpc would wait for the next one indefinitely.
            self._over = True
            self._wake.set()

    async def _requests(self) -> AsyncIterator[pb.WorkRequest]:
        while True:
            await self._wake.wait()
            # Samples may have been given to a whole fleet at once.
            await self._pace.wait()
            if self._over:
                return
            self._wake.clear()
            self._sent_at = asyncio.get_running_loop().time()
            if self._waking is not None:
                self._waking.cancel()
                self._waking = None
            for request in self._drain():
                yield request

    def _drain(self) -> Iterator[pb.WorkRequest]:
        starts, self._starts = self._starts, []
        claims, self._claims = self._claims, []
        aborts, self._aborts = self._aborts, []
        if claims:
            # Before the aborts, which may concern claimed samples.
            yield pb.WorkRequest(claim=claims)
        request, tokens = pb.WorkRequest(), 0
        interval = self._reports()
        if starts and abs(interval - self._sent_interval) > _WORTH_SENDING * self._sent_interval:
            self._sent_interval = interval
            request.report_interval.CopyFrom(duration(interval))
        for item in starts:
            request.start.append(item)
            tokens += len(item.prompt_token_ids) + len(item.prefix_token_ids)
            if tokens > _MOST_TOKENS or len(request.start) == _MOST_ITEMS:
                yield request
                request, tokens = pb.WorkRequest(), 0
        request.abort.extend(aborts)
        if request.start or request.abort:
            yield request


def _parts(response: pb.WorkResponse) -> Iterator[pb.WorkResponse]:
    """Yield a message, or parts of a long one, with its events in the order in which a message is processed."""
    kinds: dict[str, Sequence[Any]] = {
        "deltas": response.deltas,
        "finished": response.finished,
        "refused": response.refused,
        "moved": response.moved,
    }
    if sum(map(len, kinds.values())) <= _MOST_EVENTS:
        yield response
        return
    for kind, events in kinds.items():
        for begin in range(0, len(events), _MOST_EVENTS):
            part = pb.WorkResponse()
            getattr(part, kind).extend(events[begin : begin + _MOST_EVENTS])
            yield part
