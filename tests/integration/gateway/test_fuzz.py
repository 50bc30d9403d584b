"""Random messages to every public RPC: typed refusals only, and the batches beside them come back equal."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message import DecodeError, Message
from prometheus_client import CollectorRegistry

from paceline.v1 import fleet_pb2, knobs_pb2, rollout_pb2, sample_pb2, weight_pb2
from services.contracts.errors import InvalidArgument
from services.platform.tasks import end
from services.policy.config import PolicyConfig
from services.policy.process import PolicyProcess
from tests.integration.gateway.conftest import CALL, Cluster, Trainer, check_samples, make_batch, until
from tests.support.random_messages import RandomMessages
from tests.support.soak import Progress, record

SERVICES = (
    rollout_pb2.DESCRIPTOR.services_by_name["RolloutService"],
    weight_pb2.DESCRIPTOR.services_by_name["WeightService"],
    fleet_pb2.DESCRIPTOR.services_by_name["FleetService"],
)
METHODS = [method for service in SERVICES for method in service.methods]
FORBIDDEN = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
WORKERS = 8
# Of a stream that does not end by itself, and how much of it is read.
LISTEN, MOST_READ = 0.3, 20
VICTIM, RUN = "victim", "fuzz"


def valid_requests() -> dict[str, list[Message]]:
    """Return requests that would be taken, by the name of their method, to be spoilt in a field or two."""
    batch = make_batch(groups=2, samples=2, max_tokens=8)
    batch.run_id, batch.batch_id = RUN, "b0"
    name = {"run_id": RUN, "batch_id": "b0"}
    key = sample_pb2.SamplingParams(max_tokens=8)
    group = rollout_pb2.Group(prompt_id="p0", prompt_token_ids=[1, 2], samples=2, expected_tokens=9)
    disk = weight_pb2.DiskWeights(path="/nowhere", checksum="sha256:0")
    knobs = knobs_pb2.Knobs(mode="fixed", draft_cap=3)
    return {
        "SubmitRollouts": [batch],
        "OpenBatch": [
            rollout_pb2.OpenBatchRequest(
                run_id=RUN, batch_id="b1", step=3, sampling=key, max_staleness=1, stale=2, weight=1
            )
        ],
        "AddSamples": [rollout_pb2.AddSamplesRequest(run_id=RUN, batch_id="b1", groups=[group])],
        "CloseBatch": [rollout_pb2.CloseBatchRequest(run_id=RUN, batch_id="b1")],
        "StreamRollouts": [rollout_pb2.StreamRolloutsRequest(**name)],
        "AckRollouts": [rollout_pb2.AckRolloutsRequest(cursor=1, **name)],
        "Generate": [
            rollout_pb2.GenerateRequest(
                run_id=RUN, prompt_id="p", prompt_token_ids=[1, 2], sampling=key, run_seed=3
            )
        ],
        "CancelRollouts": [
            rollout_pb2.CancelRolloutsRequest(samples=[rollout_pb2.SampleKey(prompt_id="p0")], **name)
        ],
        "HintNextBatch": [rollout_pb2.HintNextBatchRequest(run_id=RUN, step=5, groups=[group], sampling=key)],
        "ReportRewards": [
            rollout_pb2.ReportRewardsRequest(
                rewards=[rollout_pb2.Reward(prompt_id="p0", reward=1.0)], kl=0.1, **name
            )
        ],
        "StartUpdate": [weight_pb2.StartUpdateRequest(run_id=RUN, policy_version=1, target=1, transport=1)],
        "UpdateWeights": [weight_pb2.UpdateWeightsRequest(update_id="u", disk=disk)],
        "FinishUpdate": [weight_pb2.FinishUpdateRequest(update_id="u", in_flight=1)],
        "Pause": [fleet_pb2.PauseRequest(instance_ids=[VICTIM])],
        "Drain": [fleet_pb2.DrainRequest(instance_id=VICTIM)],
        "SetKnobs": [fleet_pb2.SetKnobsRequest(knobs=knobs)],
        "WatchDecisions": [fleet_pb2.WatchDecisionsRequest(run_id=RUN)],
    }


@dataclass
class Fuzzer:
    """One stream of random calls, and what they were answered that they must not be."""

    channel: grpc.aio.Channel
    messages: RandomMessages
    templates: dict[str, list[Message]]
    calls: int = 0
    codes: dict[str, int] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)

    async def run(self, until: float) -> None:
        """Call until a monotonic time."""
        while time.monotonic() < until:
            await self._call(self.messages.draw.choice(METHODS))

    async def _call(self, method: MethodDescriptor) -> None:
        payload = self._payload(method)
        self.calls += 1
        try:
            await self._send(method, payload)
            code = grpc.StatusCode.OK
        except grpc.aio.AioRpcError as error:
            code = error.code()
            hangs = code is grpc.StatusCode.DEADLINE_EXCEEDED and not method.server_streaming
            if code in FORBIDDEN or hangs:
                self.findings.append(
                    f"{method.name}: {code.name} {error.details()}\n{_shown(method, payload)}"
                )
        self.codes[code.name] = self.codes.get(code.name, 0) + 1

    def _payload(self, method: MethodDescriptor) -> bytes:
        templates, chance = self.templates.get(method.name, []), self.messages.draw.random()
        if templates and chance < 0.7:
            message = self.messages.mutate(self.messages.draw.choice(templates))
        else:
            message = self.messages.build(method.input_type)
        payload = message.SerializeToString()
        return self.messages.damage(payload) if chance > 0.95 else payload

    async def _send(self, method: MethodDescriptor, payload: bytes) -> None:
        path = f"/{method.containing_service.full_name}/{method.name}"
        if method.client_streaming:
            parts = [payload] * self.messages.draw.randrange(3)
            await self.channel.stream_unary(path)(_each(parts), timeout=CALL)
        elif method.server_streaming:
            call = self.channel.unary_stream(path)(payload, timeout=LISTEN)
            read = 0
            async for _ in call:
                read += 1
                if read == MOST_READ:
                    call.cancel()
                    return
        else:
            self._learn(method, await self.channel.unary_unary(path)(payload, timeout=CALL))

    def _learn(self, method: MethodDescriptor, answer: bytes) -> None:
        """Use the names of an answer from now on."""
        message = method.output_type._concrete_class.FromString(answer)
        for each, value in message.ListFields():
            if each.type == FieldDescriptor.TYPE_STRING and not each.is_repeated:
                self.messages.names[self.messages.draw.randrange(4, len(self.messages.names))] = value


async def _each(parts: list[bytes]) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


def _shown(method: MethodDescriptor, payload: bytes) -> str:
    try:
        return str(method.input_type._concrete_class.FromString(payload))[:1000]
    except DecodeError:
        return repr(payload[:200])


async def _steps(trainer: Trainer, over: asyncio.Event) -> int:
    """Run batch after batch, each checked sample by sample; return their number."""
    number = 0
    while not over.is_set():
        request = make_batch(groups=4, samples=4)
        await trainer.submit(request)
        check_samples(request, await trainer.collect(request))
        number += 1
    return number


async def _resuming(trainer: Trainer) -> None:
    """Undo what a random Pause or Drain has stopped, as an operator would."""
    while True:
        # Not where a random message has just cost the gateway a connection; then a moment later.
        with suppress(grpc.aio.AioRpcError):
            await trainer.fleet.Resume(fleet_pb2.ResumeRequest(), timeout=CALL)
        await asyncio.sleep(0.1)


async def _telling(workers: list[Fuzzer], seconds: float) -> None:
    """Tell every ten seconds how far it is."""
    progress, began = Progress("fuzz", seconds, "second"), time.monotonic()
    while True:
        await asyncio.sleep(10)
        progress.tell(time.monotonic() - began, f"{sum(each.calls for each in workers)} calls")


@pytest.fixture
async def policy(redis_url: str, namespace: str) -> AsyncIterator[None]:
    """A policy service beside the gateway, for the RPCs that it forwards."""
    process = PolicyProcess(
        PolicyConfig(port=0, redis_url=redis_url, namespace=namespace), CollectorRegistry()
    )
    await process.start()
    running = asyncio.create_task(process.run())
    await until(lambda: process.leadership.term is not None, "the policy service leads")
    yield
    await end([running])
    await process.stop(0)


@pytest.mark.timeout(0)  # every call has a deadline
@pytest.mark.usefixtures("policy")
@pytest.mark.parametrize(
    ("seconds", "seed"), [(4, 20), pytest.param(180, None, marks=pytest.mark.soak)], ids=["short", "soak"]
)
async def test_random_messages_get_typed_refusals_and_disturb_no_batch(
    cluster: Cluster, request: pytest.FixtureRequest, seconds: float, seed: int | None
) -> None:
    option, long = request.config.getoption, request.node.get_closest_marker("soak") is not None
    seconds = option("fuzz_seconds") or seconds
    seed = option("fuzz_seed") or seed or int(time.time())
    gateway = await cluster.gateway()
    for name in ("i0", "i1", VICTIM):
        fake = await cluster.instance(name)
        # As a real instance refuses weights that are not there.
        fake.fail_stage = InvalidArgument([])
    await cluster.serving(gateway, 3)
    channel = grpc.aio.insecure_channel(gateway.gateway.address)
    names = [RUN, "b0", "p0", VICTIM, *(f"b{number}" for number in range(1, 8))]
    templates: dict[str, list[Any]] = valid_requests()
    workers = [
        Fuzzer(channel, RandomMessages(seed * WORKERS + at, [*names]), templates) for at in range(WORKERS)
    ]
    over, until = asyncio.Event(), time.monotonic() + seconds
    beside = asyncio.create_task(_steps(gateway.trainer, over))
    others = [
        asyncio.create_task(_resuming(gateway.trainer)),
        asyncio.create_task(_telling(workers, seconds)),
    ]
    await asyncio.gather(*(worker.run(until) for worker in workers))
    over.set()
    batches = await beside
    await end(others)
    await channel.close()
    findings = [finding for worker in workers for finding in worker.findings]
    codes = {
        code: sum(each.codes.get(code, 0) for each in workers) for each in workers for code in each.codes
    }
    figures = {
        "seed": seed,
        "seconds": seconds,
        "batches_beside": batches,
        "codes": codes,
        "findings": findings,
    }
    print(f"fuzz: {figures}", flush=True)
    if long:
        record("fuzz", figures)
    kinds = {finding.partition(",")[0]: finding for finding in findings}
    assert not findings, f"{len(findings)} with seed {seed}; one of each kind:\n" + "\n".join(kinds.values())
    assert batches
    # Messages of all kinds: some are taken, and most are refused by what is in them.
    assert codes["OK"]
    assert codes["INVALID_ARGUMENT"]
