"""Simulated generation instances: real gRPC servers and registrations, an engine that is a clock.

They keep the protocol of real ones as far as an undisturbed run needs it: handshake, items with prefixes, aborts,
deltas, finished samples and load. All instances of a process share one clock and one client of Redis, so that a
sample costs work only when it is reported.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import grpc

from bench.fleet.workload import MAX_TOKENS, PROMPT_TOKENS, VOCABULARY, Reporting, SimulatedPolicy
from paceline.internal.v1 import generation_pb2 as pb
from paceline.internal.v1 import generation_pb2_grpc as rpc
from paceline.times import duration
from paceline.v1 import fleet_pb2, sample_pb2
from services.platform.config.settings import ServiceConfig
from services.platform.grpc.server import GrpcServer
from services.platform.redis.registry import INSTANCES, InstanceRecord, Registration

_TICK = 0.02
MAX_RUNNING = 128
Context = grpc.aio.ServicerContext[Any, Any]


class _WorkStream:
    """Samples of one work stream, and the responses that it has yet to send."""

    def __init__(self) -> None:
        self.samples: dict[int, _SimulatedSample] = {}
        self.outbox: asyncio.Queue[pb.WorkResponse] = asyncio.Queue()


@dataclass(slots=True, eq=False)
class _SimulatedSample:
    """A sample that decodes since `begun` (loop time); `reported` of its `length` tokens were sent."""

    handle: int
    seed: int
    stream: _WorkStream
    begun: float
    prefix: int
    reported: int
    length: int

    def tokens(self, now: float, speed: float) -> int:
        """Return how many response tokens there are by now."""
        return min(self.length, self.prefix + int((now - self.begun) * speed + 1e-6))


class EngineClock:
    """Engines of all instances of a process: reports what is due, in one message for each instance and tick."""

    def __init__(self, policy: SimulatedPolicy, reporting: Reporting) -> None:
        self.policy = policy
        self.reporting = reporting
        self.ended = 0
        self._due: list[tuple[float, int, _SimulatedSample]] = []
        self._order = count()

    def begin(self, stream: _WorkStream, item: pb.WorkItem) -> None:
        """Begin a sample, or go on with one."""
        now, prefix = asyncio.get_running_loop().time(), len(item.prefix_token_ids)
        length = max(prefix, min(self.policy.length(item.seed), item.sampling.max_tokens or MAX_TOKENS))
        sample = _SimulatedSample(item.handle, item.seed, stream, now, prefix, prefix, length)
        stream.samples[item.handle] = sample
        self._schedule(sample, now)

    async def run(self) -> None:
        """Report until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            now, responses = loop.time(), dict[_WorkStream, pb.WorkResponse]()
            while self._due and self._due[0][0] <= now:
                _, _, sample = heapq.heappop(self._due)
                if sample.stream.samples.get(sample.handle) is sample:
                    self._report(sample, now, responses.setdefault(sample.stream, pb.WorkResponse()))
            for stream, response in responses.items():
                response.load.running = len(stream.samples)
                stream.outbox.put_nowait(response)
            await asyncio.sleep(_TICK)

    def end(
        self, sample: _SimulatedSample, response: pb.WorkResponse, reason: sample_pb2.FinishReason
    ) -> None:
        """Add the end of a sample to a response."""
        del sample.stream.samples[sample.handle]
        self.ended += 1
        steps = sample.length - sample.prefix
        response.finished.add(
            handle=sample.handle,
            finish_reason=reason,
            decode_steps=steps,
            generation_time=duration(steps / self.reporting.speed),
        )

    def _report(self, sample: _SimulatedSample, now: float, response: pb.WorkResponse) -> None:
        known = sample.tokens(now, self.reporting.speed)
        if known > sample.reported:
            tokens, logprobs = self.policy.slice(sample.seed, sample.reported, known)
            response.deltas.add(handle=sample.handle, token_ids=tokens, logprobs=logprobs)
            sample.reported = known
        if known < sample.length:
            self._schedule(sample, now)
            return
        cut = known == MAX_TOKENS
        reason = sample_pb2.FINISH_REASON_LENGTH if cut else sample_pb2.FINISH_REASON_STOP
        self.end(sample, response, reason)

    def _schedule(self, sample: _SimulatedSample, now: float) -> None:
        known = sample.tokens(now, self.reporting.speed)
        due = self.reporting.due(now, known - sample.reported, sample.length - known)
        heapq.heappush(self._due, (due, next(self._order), sample))


class ReplayingInstance(rpc.GenerationServiceServicer):
    """One instance of a process, with a server and a record in the registry of its own."""

    def __init__(self, instance_id: str, config: ServiceConfig, clock: EngineClock) -> None:
        self._instance_id = instance_id
        self._clock = clock
        self._server = GrpcServer(config, service="generation")
        self._streams: set[_WorkStream] = set()
        self.registration: Registration
        rpc.add_GenerationServiceServicer_to_server(self, self._server.server)

    async def start(self, registration: Any) -> Registration:
        """Listen and register; `registration` makes one of a record."""
        await self._server.start()
        record = InstanceRecord(
            INSTANCES,
            self._instance_id,
            address=self._server.address,
            state="serving",
            max_running=MAX_RUNNING,
            max_model_len=PROMPT_TOKENS + MAX_TOKENS,
            vocab_size=VOCABULARY,
            model="simulated",
            device="none",
        )
        self.registration = registration(record)
        await self.registration.register()
        return self.registration

    async def Work(
        self, request_iterator: AsyncIterator[pb.WorkRequest], context: Context
    ) -> AsyncIterator[pb.WorkResponse]:
        """Take items and send what the clock reports."""
        stream = _WorkStream()
        self._streams.add(stream)
        reader = asyncio.create_task(self._read(stream, request_iterator))
        try:
            while True:
                yield await stream.outbox.get()
        finally:
            reader.cancel()
            stream.samples.clear()
            self._streams.discard(stream)

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:
        """Answer the handshake."""
        record = self.registration.record
        return pb.GetStatusResponse(
            instance=fleet_pb2.Instance(
                instance_id=self._instance_id,
                epoch=record.epoch,
                max_running=record.max_running,
                max_model_len=record.max_model_len,
                vocab_size=record.vocab_size,
                state=fleet_pb2.INSTANCE_STATE_SERVING,
                load=fleet_pb2.InstanceLoad(running=sum(len(each.samples) for each in self._streams)),
            )
        )

    async def _read(self, stream: _WorkStream, requests: AsyncIterator[pb.WorkRequest]) -> None:
        async for request in requests:
            for item in request.start:
                self._clock.begin(stream, item)
            response = pb.WorkResponse()
            for handle in request.abort:
                if handle in stream.samples:
                    self._clock.end(stream.samples[handle], response, sample_pb2.FINISH_REASON_ABORTED)
            if response.finished:
                stream.outbox.put_nowait(response)
