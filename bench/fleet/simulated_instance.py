"""Simulated generation instances: real gRPC servers and registrations, with a clock in place of the engine.

They implement the part of the protocol that an undisturbed run needs: handshake, items with prefixes, aborts,
deltas, finished samples and load. The code of real instances (`services/generation/loop/work_stream.py`) decides
when a stream reports and what. All instances of a process share one clock and one Redis client, so that a sample
costs work only when it is reported. This module is also the program that runs such a process.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import math
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from itertools import count, cycle
from typing import Any

import grpc

from bench.fleet.workload import MAX_TOKENS, MEDIAN, PROMPT_TOKENS, VOCABULARY, Reporting, SimulatedPolicy
from bench.report import option_parser
from paceline.internal.v1 import generation_pb2 as pb
from paceline.internal.v1 import generation_pb2_grpc as rpc
from paceline.times import duration, seconds_of
from paceline.v1 import fleet_pb2, sample_pb2
from services.generation.loop.work_stream import ReportingStream
from services.platform.config import ServiceConfig
from services.platform.grpc.server import GrpcServer
from services.platform.redis.connection import Keys, connect
from services.platform.redis.registry import INSTANCES, InstanceRecord, Registration

# Seconds between two readings of the clock, and readings between two flushes of a stream. Streams are flushed
# every 50 ms, as streams of real instances are, and not all at once.
_TICK = 0.01
_PHASES = 5
MAX_RUNNING = 128
Context = grpc.aio.ServicerContext[Any, Any]
Stream = ReportingStream["ClockedSample"]


@dataclass(slots=True, eq=False)
class ClockedSample:
    """A sample that decodes since `begun` (loop time); `reported` of its `length` tokens were sent."""

    handle: int
    seed: int
    clock: EngineClock
    begun: float
    prefix: int
    reported: int
    length: int
    streamed: bool = False
    quota: int = sys.maxsize
    report_at: float = math.inf

    def tokens(self) -> int:
        """Return the number of response tokens decoded so far."""
        made = int((self.clock.now - self.begun) * self.clock.reporting.speed + 1e-6)
        return min(self.length, self.prefix + made)

    def take_delta(self) -> pb.Delta | None:
        """Return the tokens since the last call, or None if there are none."""
        begin, self.reported = self.reported, self.tokens()
        if begin == self.reported:
            return None
        tokens, logprobs = self.clock.policy.slice(self.seed, begin, self.reported)
        return pb.Delta(
            handle=self.handle, tokens=sample_pb2.TokenColumns(token_ids=tokens, logprobs=logprobs)
        )


class EngineClock:
    """Engines of all instances of a process. The code of real instances decides what they report and when."""

    def __init__(self, policy: SimulatedPolicy, reporting: Reporting) -> None:
        self.policy = policy
        self.reporting = reporting
        self.ended = 0
        self.now = asyncio.get_running_loop().time()
        self._due: list[tuple[float, int, ClockedSample, Stream]] = []
        self._order = count()
        self._phases: list[set[Stream]] = [set() for _ in range(_PHASES)]

    def open(self) -> Stream:
        """Return a new stream, which is flushed until it is closed."""
        stream = Stream(asyncio.get_running_loop(), self.reporting.rules)
        min(self._phases, key=len).add(stream)
        return stream

    def close(self, stream: Stream) -> None:
        """Remove a stream and its samples."""
        stream.samples.clear()
        for phase in self._phases:
            phase.discard(stream)

    def begin(self, stream: Stream, item: pb.WorkItem) -> None:
        """Begin a sample, or resume it after its prefix."""
        self.now, prefix = asyncio.get_running_loop().time(), len(item.prefix_token_ids)
        length = max(
            prefix, min(self.policy.length(item.seed), item.sampling.max_tokens or self.policy.longest)
        )
        sample = ClockedSample(item.handle, item.seed, self, self.now, prefix, prefix, length, item.streamed)
        stream.add(sample, self.now)
        self._schedule(sample, stream)

    def abort(self, stream: Stream, handle: int) -> None:
        """End a sample in its current state."""
        sample = stream.samples.get(handle)
        if sample is not None:
            self._end(sample, stream, sample_pb2.FINISH_REASON_ABORTED)
            self._flush(stream)

    async def run(self) -> None:
        """Report until cancelled."""
        loop = asyncio.get_running_loop()
        for phase in cycle(self._phases):
            self.now = loop.time()
            while self._due and self._due[0][0] <= self.now:
                _, _, sample, stream = heapq.heappop(self._due)
                if stream.samples.get(sample.handle) is sample:
                    self._advance(sample, stream)
            for stream in phase:
                self._flush(stream)
            await asyncio.sleep(_TICK)

    def _advance(self, sample: ClockedSample, stream: Stream) -> None:
        known = sample.tokens()
        if known == sample.length:
            cut = known == self.policy.longest
            reason = sample_pb2.FINISH_REASON_LENGTH if cut else sample_pb2.FINISH_REASON_STOP
            self._end(sample, stream, reason)
            return
        if known - sample.reported >= sample.quota:
            stream.reached(sample)
        self._schedule(sample, stream)

    def _end(self, sample: ClockedSample, stream: Stream, reason: sample_pb2.FinishReason) -> None:
        self.ended += 1
        steps = sample.tokens() - sample.prefix
        finished = pb.Finished(
            handle=sample.handle,
            finish_reason=reason,
            decode_steps=steps,
            generation_time=duration(steps / self.reporting.speed),
        )
        stream.finish(sample, finished)

    def _flush(self, stream: Stream) -> None:
        load = fleet_pb2.InstanceLoad(running=len(stream.samples))
        stream.flush(load, 0, self.now)

    def _schedule(self, sample: ClockedSample, stream: Stream) -> None:
        """Schedule the next check of a sample: when it ends or must report, at the earliest in one tick."""
        known = sample.tokens()
        wanted = min(sample.length - known, max(0, sample.reported + sample.quota - known))
        due = max(wanted / self.reporting.speed, _TICK)
        heapq.heappush(self._due, (self.now + due, next(self._order), sample, stream))


class ReplayingInstance(rpc.GenerationServiceServicer):
    """One instance of a process, with its own server and registry record."""

    def __init__(self, instance_id: str, config: ServiceConfig, clock: EngineClock) -> None:
        self._instance_id = instance_id
        self._clock = clock
        self._server = GrpcServer(config, service="generation")
        self._streams: set[Stream] = set()
        self.registration: Registration
        rpc.add_GenerationServiceServicer_to_server(self, self._server.server)

    async def start(self, registration: Any) -> Registration:
        """Listen and register; `registration` creates a registration from a record."""
        await self._server.start()
        record = InstanceRecord(
            INSTANCES,
            self._instance_id,
            address=self._server.address,
            state="serving",
            max_running=MAX_RUNNING,
            max_model_len=PROMPT_TOKENS + self._clock.policy.longest,
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
        """Take items and send the clock's reports."""
        stream = self._clock.open()
        self._streams.add(stream)
        reader = asyncio.create_task(self._read(stream, request_iterator))
        try:
            while isinstance(event := await stream.outbox.get(), pb.WorkResponse):
                yield event
        finally:
            reader.cancel()
            self._clock.close(stream)
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

    async def _read(self, stream: Stream, requests: AsyncIterator[pb.WorkRequest]) -> None:
        async for request in requests:
            if request.HasField("report_interval"):
                stream.report_every(seconds_of(request.report_interval))
            for item in request.start:
                self._clock.begin(stream, item)
            for handle in request.abort:
                self._clock.abort(stream, handle)


CLIENT = "simulated-fleet"
"""Name of this process's Redis connections, which distinguishes their traffic from the control plane's."""
_BEAT_SECONDS = 1.0
# The simulated fleet shares its cores with the measured processes. A late heartbeat must not look like a lost
# instance.
_TTL = 20.0


def main() -> None:
    """Serve instances until killed."""
    asyncio.run(_serve(_arguments()))


async def _serve(given: argparse.Namespace) -> None:
    config = ServiceConfig(redis_url=f"{given.redis_url}?client_name={CLIENT}", log_level="warning")
    redis, keys = connect(config), Keys(config.namespace)
    reporting = Reporting.checkpoints(given.speed, given.compression)
    clock = EngineClock(SimulatedPolicy.create(given.longest, given.median), reporting)
    registrations = [
        await ReplayingInstance(f"instance-{number}", config, clock).start(
            partial(Registration, redis, keys, ttl=_TTL)
        )
        for number in range(given.first, given.first + given.count)
    ]
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(clock.run())
        tasks.create_task(_beat(registrations))


async def _beat(registrations: list[Registration]) -> None:
    """Send every instance's heartbeat once a second, one after the other over one connection."""
    loop = asyncio.get_running_loop()
    while True:
        began = loop.time()
        for each in registrations:
            await each.update()
        await asyncio.sleep(max(0.0, began + _BEAT_SECONDS - loop.time()))


def _arguments() -> argparse.Namespace:
    parser = option_parser(__doc__)
    parser.add_argument("--redis-url", required=True)
    parser.add_argument("--first", type=int, required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--speed", type=float, default=50.0)
    parser.add_argument("--compression", type=float, default=1.0)
    parser.add_argument("--longest", type=int, default=MAX_TOKENS)
    parser.add_argument("--median", type=float, default=MEDIAN)
    return parser.parse_args()


if __name__ == "__main__":
    main()
