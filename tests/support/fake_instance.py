"""A generation instance without a model: what the gateway is tested against.

It stands for a vLLM instance as the gateway sees one: a gRPC server of GenerationService and a record in
a real Redis with a heartbeat. It keeps that contract in full (order of events, refusals, aborts, prefixes,
stage and apply), over real sockets. What it does not have is a model: the token at a position is a hash of
(seed, position, policy version), and a token of 0 ends a sample as an end-of-sequence token would, which
only the instance knows of. The text of token n is the word `wn`, which may be a stop string. So a
test can say what every sample must be, whatever happened to it. Tests of
the real engine are elsewhere. Nor does it look for rollouts: the test puts them into `cached`. Of them it
takes over `keep` tokens when a LENIENT sample starts, with log-probabilities as an instance tells them; for
any other level it counts how far they agree.

A test moves a running sample with `move`: the other fake decodes on at once, and hands over what it has when the
sample is claimed there.

In a test: `async with FakeInstance(...) as fake`, and then its controls (`hold_at`, `freeze`, `kill`,
`refuse_with`, `fail_stage`, ...). As a process, to be killed or stopped by signals:
`python -m tests.support.fake_instance --id i0 --redis-url ... --namespace ...`.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile

import grpc

from paceline.internal.v1 import generation_pb2 as pb
from paceline.internal.v1 import generation_pb2_grpc as rpc
from paceline.internal.v1.weight_peer_pb2 import PeerWeights
from paceline.times import duration
from paceline.v1 import fleet_pb2, sample_pb2, weight_pb2
from services.contracts.errors import FailedPrecondition, ServiceError
from services.platform.config import ServiceConfig
from services.platform.grpc.server import GrpcServer
from services.platform.redis.connection import Keys, connect
from services.platform.redis.registry import InstanceRecord, Registration
from services.platform.tasks import end
from tests.support.token_columns import columns

_STATES = {
    "serving": fleet_pb2.INSTANCE_STATE_SERVING,
    "paused": fleet_pb2.INSTANCE_STATE_PAUSED,
    "draining": fleet_pb2.INSTANCE_STATE_DRAINING,
}
VOCAB = 1000
MAX_MODEL_LEN = 512
EOS = 0


def token_at(seed: int, position: int, version: int) -> tuple[int, float]:
    """Return the token and log-probability at a response position. One in 64 is the end of the sequence."""
    digest = hashlib.blake2b(struct.pack("<QQQ", seed, position, version), digest_size=8).digest()
    value = int.from_bytes(digest, "little")
    token = EOS if value % 64 == 0 else 1 + value % (VOCAB - 1)
    # A multiple of 1/64: exact in float32.
    return token, -((value >> 32) % 640) / 64


def response_of(
    seed: int, version: int, max_tokens: int, ignore_eos: bool = False
) -> tuple[list[int], list[float]]:
    """Return the whole response of a sample that nothing happened to."""
    tokens: list[int] = []
    logprobs: list[float] = []
    while len(tokens) < max_tokens and (ignore_eos or EOS not in tokens[-1:]):
        token, logprob = token_at(seed, len(tokens), version)
        tokens.append(token)
        logprobs.append(logprob)
    return tokens, logprobs


def likeliest_at(token: int, count: int) -> tuple[list[int], list[float]]:
    """Return the likeliest tokens where a token was sampled, which is none of them, and their log-probabilities."""
    return [(token + 1 + place) % VOCAB for place in range(count)], [-place / 64 for place in range(count)]


def told_of_prompt(item: pb.WorkItem) -> sample_pb2.TokenColumns | None:
    """Return what is told of the prompt of an item, if it asks for it: the same for every prompt token."""
    if not item.sampling.HasField("prompt_logprobs"):
        return None
    told, after = sample_pb2.TokenColumns(), item.prompt_token_ids[1:]
    told.logprobs.extend(-token / 64 for token in after)
    for token in after:
        tokens, logprobs = likeliest_at(token, item.sampling.prompt_logprobs)
        told.top_token_ids.extend(tokens)
        told.top_logprobs.extend(logprobs)
    return told


def verified_logprob(token: int, position: int, version: int) -> float:
    """What a version says of a token that it verified, as `token_at` says of one that it sampled."""
    return -((token + 7 * position + 13 * version) % 320) / 64


@dataclass(frozen=True)
class Cached:
    """A cached rollout: tokens and log-probabilities of the version that generated it."""

    tokens: Sequence[int]
    logprobs: Sequence[float]


@dataclass(eq=False)
class _Sample:
    item: pb.WorkItem
    stream: _Stream
    length: int
    cached: Cached | None = None
    # LENIENT: so many of the cached tokens are taken over.
    keep: int = 0
    tokens: list[int] = field(default_factory=list)
    new_tokens: list[int] = field(default_factory=list)
    new_logprobs: list[float] = field(default_factory=list)
    new_verified: list[float] = field(default_factory=list)
    prompt_told: bool = False
    steps: int = 0
    # It has kept its KV over an update.
    mixed_kv: bool = False

    def reused(self) -> int:
        """Return the response tokens that are the cached rollout's, before the first that is not."""
        if self.item.exactness.level == sample_pb2.EXACTNESS_LEVEL_LENIENT:
            return min(self.keep, self.length)
        cached = self.cached.tokens if self.cached else ()
        pairs = zip(self.tokens, cached, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


class _Stream:
    def __init__(self) -> None:
        self.samples: dict[int, _Sample] = {}
        self.outbox: asyncio.Queue[pb.WorkResponse | Exception] = asyncio.Queue()


class FakeInstance(rpc.GenerationServiceServicer):
    """One fake instance. Its controls may be set at any time and work from the next step on."""

    def __init__(
        self,
        redis_url: str,
        namespace: str,
        instance_id: str,
        *,
        version: int = 0,
        max_running: int = 64,
        step_seconds: float = 0.001,
        flush_every: int = 4,
    ) -> None:
        self.config = ServiceConfig(redis_url=redis_url, namespace=namespace)
        self.instance_id = instance_id
        self.version = version
        self.max_running = max_running
        self.step_seconds = step_seconds
        self.flush_every = flush_every
        # Controls ---------------------------------------------------------------------------------------
        # No sample grows beyond this many tokens, so that it is sure to be unfinished.
        self.hold_at: int | None = None
        # Every item is refused with this code.
        self.refuse_with: grpc.StatusCode | None = None
        self.fail_stage: ServiceError | None = None
        self.fail_apply: ServiceError | None = None
        # Set to let StageWeights or ApplyWeights go on; they wait for it.
        self.stage_gate = asyncio.Event()
        self.apply_gate = asyncio.Event()
        self.stage_gate.set()
        self.apply_gate.set()
        # Do not answer aborts.
        self.deaf = False
        # The cached rollouts by prompt id and slot, and how many of their tokens LENIENT takes over.
        self.cached: dict[tuple[str, int], Cached] = {}
        self.keep = 0
        # Appended to the verified log-probabilities of every delta: a mistake.
        self.surplus_verified: list[float] = []
        # How long a drain waits for the samples to be moved away.
        self.evacuation_seconds = 0.0
        # What else its server serves.
        self.beside: list[Callable[[grpc.aio.Server], None]] = []
        # What happened ----------------------------------------------------------------------------------
        self.accepted: list[pb.WorkItem] = []
        self.aborted: list[int] = []
        self.applied: list[int] = []
        self.discarded: list[int] = []
        self.steps = self.generated = 0
        self.streams: set[_Stream] = set()
        # Samples that were moved here and not claimed, by migration id, each on a stream of its own.
        self.unclaimed: dict[str, _Stream] = {}
        self.claimed: list[str] = []
        self.staged: tuple[int, str] | None = None
        # What it was told to have from a trainer or other instances.
        self.peers: list[PeerWeights] = []
        self.paused = False
        self.draining = False
        self._unfrozen = asyncio.Event()
        self._unfrozen.set()
        self._tasks: list[asyncio.Task[None]] = []
        self._redis = connect(self.config)
        self._server: GrpcServer | None = None
        self.registration: Registration | None = None

    async def __aenter__(self) -> FakeInstance:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    async def start(self) -> None:
        """Listen and registers."""
        self._server = GrpcServer(self.config, service="generation")
        rpc.add_GenerationServiceServicer_to_server(self, self._server.server)
        for add in self.beside:
            add(self._server.server)
        await self._server.start()
        record = InstanceRecord(
            "generation",
            self.instance_id,
            address=self._server.address,
            state="serving",
            policy_version=self.version,
            max_running=self.max_running,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB,
            has_text=True,
            model="fake",
            device="none",
            keeps_kv=True,
        )
        self.registration = Registration(self._redis, Keys(self.config.namespace), record)
        await self.registration.register()
        self._tasks = [asyncio.create_task(self._beat()), asyncio.create_task(self._steps())]

    async def kill(self) -> None:
        """Goes as a killed process does: sockets close, the record stays until it expires."""
        await end(self._tasks)
        self._unfrozen.set()
        if self._server is not None:
            await self._server.stop(0)
            self._server = None
            await self._redis.aclose()

    def freeze(self) -> None:
        """Stop as SIGSTOP does: sockets stay open, nothing moves, no heartbeat."""
        self._unfrozen.clear()

    def unfreeze(self) -> None:
        """Goes on as SIGCONT does."""
        self._unfrozen.set()

    @property
    def address(self) -> str:
        """Where it is reached, once it has begun."""
        assert self._server is not None
        return self._server.address

    @property
    def state(self) -> str:
        """As an instance says it."""
        return "draining" if self.draining else "paused" if self.paused else "serving"

    def running(self) -> list[_Sample]:
        """Return the samples that are not finished."""
        streams = (*self.streams, *self.unclaimed.values())
        return [sample for stream in streams for sample in stream.samples.values()]

    def move(
        self, sample: _Sample, migration_id: str, receiver: FakeInstance | None, name: str = "", more: int = 0
    ) -> None:
        """Move a sample to another fake (None: to one that loses it, called `name`).

        `more` is added to the number of tokens that the sample is said to have: a mistake."""
        handle, stream = sample.item.handle, sample.stream
        response = pb.WorkResponse(policy_version=self.version)
        self._take(sample, response)
        response.moved.add(
            handle=handle,
            migration_id=migration_id,
            instance_id=receiver.instance_id if receiver is not None else name,
            response_tokens=sample.length + more,
        )
        del stream.samples[handle]
        if receiver is not None:
            sample.stream = _Stream()
            sample.stream.samples[handle] = sample
            receiver.unclaimed[migration_id] = sample.stream
        stream.outbox.put_nowait(response)

    # GenerationService ---------------------------------------------------------------------------------

    async def Work(
        self, request_iterator: AsyncIterator[pb.WorkRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.WorkResponse]:
        await self._unfrozen.wait()
        stream = _Stream()
        self.streams.add(stream)
        reader = asyncio.create_task(self._read(stream, request_iterator))
        try:
            while True:
                event = await stream.outbox.get()
                await self._unfrozen.wait()
                if isinstance(event, Exception):
                    raise event
                yield event
        finally:
            reader.cancel()
            self.streams.discard(stream)

    async def GetStatus(
        self, request: pb.GetStatusRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetStatusResponse:
        await self._unfrozen.wait()
        assert self.registration is not None
        return pb.GetStatusResponse(
            instance=fleet_pb2.Instance(
                instance_id=self.instance_id,
                epoch=self.registration.record.epoch,
                policy_version=self.version,
                max_running=self.max_running,
                max_model_len=MAX_MODEL_LEN,
                vocab_size=VOCAB,
                state=_STATES[self.state],
                load=fleet_pb2.InstanceLoad(
                    running=len(self.running()),
                    step_time=duration(self.step_seconds),
                    steps=self.steps,
                    generated_tokens=self.generated,
                ),
            ),
            staged_policy_version=self.staged[0] if self.staged else 0,
            staged_checksum=f"sha256:{self.staged[1]}" if self.staged else "",
        )

    async def PauseEngine(
        self, request: pb.PauseEngineRequest, context: grpc.aio.ServicerContext
    ) -> pb.PauseEngineResponse:
        self.paused = True
        return pb.PauseEngineResponse()

    async def ResumeEngine(
        self, request: pb.ResumeEngineRequest, context: grpc.aio.ServicerContext
    ) -> pb.ResumeEngineResponse:
        self.paused = self.draining = False
        return pb.ResumeEngineResponse()

    async def DrainEngine(
        self, request: pb.DrainEngineRequest, context: grpc.aio.ServicerContext
    ) -> pb.DrainEngineResponse:
        self.draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(self.evacuation_seconds):
                while self.running():  # noqa: ASYNC110 (nothing is set when it is)
                    await asyncio.sleep(0.005)
        samples = self.running()
        for sample in samples:
            self._finish(sample, sample_pb2.FINISH_REASON_ABORTED)
        return pb.DrainEngineResponse(handed_over=len(samples))

    async def StageWeights(
        self, request: pb.StageWeightsRequest, context: grpc.aio.ServicerContext
    ) -> pb.StageWeightsResponse:
        await self.stage_gate.wait()
        if self.fail_stage is not None:
            raise self.fail_stage
        if request.HasField("peers"):
            self.peers.append(request.peers)
        self.staged = (request.policy_version, request.disk.path)
        return pb.StageWeightsResponse(checksum=f"sha256:{request.disk.path}", stage_time=duration(0.01))

    async def ApplyWeights(
        self, request: pb.ApplyWeightsRequest, context: grpc.aio.ServicerContext
    ) -> pb.ApplyWeightsResponse:
        await self.apply_gate.wait()
        if self.fail_apply is not None:
            raise self.fail_apply
        keeps_kv = request.in_flight == weight_pb2.IN_FLIGHT_KEEP_KV
        goes_on = keeps_kv or request.in_flight == weight_pb2.IN_FLIGHT_CONTINUE
        if self.running() and not goes_on:
            raise FailedPrecondition("SAMPLES_RUNNING", f"{len(self.running())} samples are running")
        if self.staged is None or self.staged[0] != request.policy_version:
            raise FailedPrecondition("NOT_STAGED", f"version {request.policy_version} is not staged")
        for stream in self.streams:
            self._flush(stream)
        for sample in self.running():
            sample.mixed_kv = keeps_kv and sample.steps > 0
        self.version, self.staged = request.policy_version, None
        self.applied.append(request.policy_version)
        assert self.registration is not None
        await self.registration.update(policy_version=self.version)
        return pb.ApplyWeightsResponse(
            apply_time=duration(0.02),
            dropped_blocks=7,
            continued_samples=len(self.running()),
            kept_samples=sum(sample.mixed_kv for sample in self.running()),
        )

    async def DiscardWeights(
        self, request: pb.DiscardWeightsRequest, context: grpc.aio.ServicerContext
    ) -> pb.DiscardWeightsResponse:
        self.discarded.append(request.policy_version)
        self.staged = None
        return pb.DiscardWeightsResponse()

    # The engine ----------------------------------------------------------------------------------------

    async def _beat(self) -> None:
        assert self.registration is not None
        while True:
            await self._unfrozen.wait()
            await self.registration.update()
            # Well within its expiry, even if this process is held up for two seconds.
            await asyncio.sleep(0.25)

    async def _read(self, stream: _Stream, requests: AsyncIterator[pb.WorkRequest]) -> None:
        async for request in requests:
            await self._unfrozen.wait()
            for claim in request.claim:
                self._claim(stream, claim)
            for item in request.start:
                self._start(stream, item)
            for handle in request.abort:
                self.aborted.append(handle)
                sample = stream.samples.get(handle)
                if sample is not None and not self.deaf:
                    self._finish(sample, sample_pb2.FINISH_REASON_ABORTED)

    def _start(self, stream: _Stream, item: pb.WorkItem) -> None:
        code = self.refuse_with
        if self.draining or item.policy_version != self.version:
            code = grpc.StatusCode.FAILED_PRECONDITION
        if code is not None:
            refused = pb.Refused(handle=item.handle, code=code.value[0], message="refused", field="seed")
            stream.outbox.put_nowait(pb.WorkResponse(refused=[refused], policy_version=self.version))
            return
        self.accepted.append(item)
        sample = _Sample(item, stream, len(item.prefix_token_ids), tokens=list(item.prefix_token_ids))
        sample.cached = self.cached.get((item.prompt_id, item.slot)) if item.run_id else None
        lenient = item.exactness.level == sample_pb2.EXACTNESS_LEVEL_LENIENT
        if lenient and sample.cached is not None and not item.prefix_token_ids:
            sample.keep = min(self.keep, len(sample.cached.tokens))
        stream.samples[item.handle] = sample

    def _claim(self, stream: _Stream, claim: pb.Claim) -> None:
        old = self.unclaimed.pop(claim.migration_id, None)
        if old is None:
            code = grpc.StatusCode.NOT_FOUND.value[0]
            refused = pb.Refused(handle=claim.handle, code=code, message="not here")
            stream.outbox.put_nowait(pb.WorkResponse(refused=[refused], policy_version=self.version))
            return
        self.claimed.append(claim.migration_id)
        while not old.outbox.empty():
            response = old.outbox.get_nowait()
            assert isinstance(response, pb.WorkResponse)
            for event in (*response.deltas, *response.finished):
                event.handle = claim.handle
            stream.outbox.put_nowait(response)
        for sample in old.samples.values():
            sample.item.handle, sample.stream = claim.handle, stream
            stream.samples[claim.handle] = sample

    async def _steps(self) -> None:
        while True:
            await asyncio.sleep(self.step_seconds)
            await self._unfrozen.wait()
            if self.paused:
                continue
            self.steps += 1
            for sample in self.running()[: self.max_running]:
                self._step(sample)
            if self.steps % self.flush_every == 0:
                for stream in self.streams:
                    self._flush(stream)

    def _step(self, sample: _Sample) -> None:
        if self.hold_at is not None and sample.length >= self.hold_at:
            return
        sampling = sample.item.sampling
        token, logprob = token_at(sample.item.seed, sample.length, self.version)
        if sample.length < sample.keep and sample.cached is not None:
            token, logprob = sample.cached.tokens[sample.length], sample.cached.logprobs[sample.length]
            sample.new_verified.append(verified_logprob(token, sample.length, self.version))
        sample.length += 1
        sample.steps += 1
        self.generated += 1
        sample.tokens.append(token)
        sample.new_tokens.append(token)
        sample.new_logprobs.append(logprob)
        limit = MAX_MODEL_LEN - len(sample.item.prompt_token_ids)
        if sampling.HasField("max_tokens"):
            limit = min(limit, sampling.max_tokens)
        if f"w{token}" in sampling.stop:
            self._finish(sample, sample_pb2.FINISH_REASON_STOP, stop_string=f"w{token}")
        elif token in sampling.stop_token_ids or (token == EOS and not sampling.ignore_eos):
            self._finish(sample, sample_pb2.FINISH_REASON_STOP)
        elif sample.length >= limit:
            self._finish(sample, sample_pb2.FINISH_REASON_LENGTH)

    def hand_back(self, sample: _Sample, instance_id: str) -> None:
        """End a sample that is to be resumed by its prefix on another instance."""
        self._finish(sample, sample_pb2.FINISH_REASON_ABORTED, instance_id)

    def _finish(
        self, sample: _Sample, reason: sample_pb2.FinishReason, resume_on: str = "", stop_string: str = ""
    ) -> None:
        del sample.stream.samples[sample.item.handle]
        finished = pb.Finished(
            handle=sample.item.handle,
            finish_reason=reason,
            decode_steps=sample.steps,
            queue_time=duration(0.001),
            generation_time=duration(sample.steps * self.step_seconds),
            prefill_time=duration(self.step_seconds),
            plain_time=duration(max(0, sample.steps - 1) * self.step_seconds),
            draft_sources=[sample_pb2.DraftSource(drafter="suffix", drafted=4, accepted=3)],
            reused_prefix=sample.reused(),
            cached_tokens=len(sample.cached.tokens) if sample.cached else 0,
            resume_on=resume_on,
            stop_string=stop_string,
        )
        response = pb.WorkResponse(finished=[finished], policy_version=self.version)
        self._take(sample, response)
        sample.stream.outbox.put_nowait(response)

    def _flush(self, stream: _Stream) -> None:
        response = pb.WorkResponse(policy_version=self.version)
        for sample in stream.samples.values():
            self._take(sample, response)
        if response.deltas:
            response.load.running = len(stream.samples)
            stream.outbox.put_nowait(response)

    def _take(self, sample: _Sample, response: pb.WorkResponse) -> None:
        if sample.new_tokens:
            told = [likeliest_at(token, sample.item.sampling.top_logprobs) for token in sample.new_tokens]
            response.deltas.add(
                handle=sample.item.handle,
                tokens=columns(
                    sample.new_tokens,
                    sample.new_logprobs,
                    self.version,
                    mixed_kv=sample.mixed_kv,
                    top_token_ids=[token for tokens, _ in told for token in tokens],
                    top_logprobs=[logprob for _, logprobs in told for logprob in logprobs],
                ),
                verified_logprobs=sample.new_verified + self.surplus_verified,
                prompt_logprobs=None if sample.prompt_told else told_of_prompt(sample.item),
            )
            sample.prompt_told = True
            sample.new_tokens, sample.new_logprobs, sample.new_verified = [], [], []


async def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--id", required=True)
    parser.add_argument("--redis-url", required=True)
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--step-seconds", type=float, default=0.001)
    parser.add_argument("--hold-at", type=int)
    given = parser.parse_args()
    fake = FakeInstance(given.redis_url, given.namespace, given.id, step_seconds=given.step_seconds)
    fake.hold_at = given.hold_at
    async with fake:
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main())
