"""A gateway of one's own, fake instances, and trainer's stubs, all over real sockets and a real Redis."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from prometheus_client import CollectorRegistry

from paceline.convert.rollouts import version_spans
from paceline.v1 import fleet_pb2_grpc, rollout_pb2, rollout_pb2_grpc, sample_pb2, weight_pb2_grpc
from services.contracts.gateway_keys import BatchKeys
from services.contracts.seeds import sample_seed
from services.gateway.config import GatewayConfig
from services.gateway.gateway import Gateway
from services.gateway.journal.chunks import Head
from services.platform.tasks import end
from tests.support.fake_instance import FakeInstance, response_of
from tests.support.waiting import until

CALL = 60.0
"""Deadline of every call and every wait, in seconds: far above what anything takes."""


@dataclass
class SampleStream:
    """Stream of a batch, without events that carry no sample."""

    call: Any

    async def __aiter__(self) -> AsyncIterator[rollout_pb2.StreamRolloutsResponse]:
        async for event in self.call:
            if event.HasField("sample"):
                yield event

    async def read(self) -> Any:
        """Return the next event, or grpc.aio.EOF."""
        event = await self.call.read()
        while event is not grpc.aio.EOF and not event.HasField("sample"):
            event = await self.call.read()
        return event

    def cancel(self) -> None:
        self.call.cancel()


@dataclass
class Trainer:
    """Stubs of the three services of one gateway."""

    channel: grpc.aio.Channel

    def __post_init__(self) -> None:
        self.rollouts: Any = rollout_pb2_grpc.RolloutServiceStub(self.channel)
        self.weights: Any = weight_pb2_grpc.WeightServiceStub(self.channel)
        self.fleet: Any = fleet_pb2_grpc.FleetServiceStub(self.channel)

    async def submit(self, request: rollout_pb2.SubmitRolloutsRequest) -> rollout_pb2.SubmitRolloutsResponse:
        return await self.rollouts.SubmitRollouts(request, timeout=CALL)

    def stream(self, request: rollout_pb2.SubmitRolloutsRequest, cursor: int = 0) -> SampleStream:
        return SampleStream(self.events(request, cursor))

    def events(self, request: rollout_pb2.SubmitRolloutsRequest, cursor: int = 0) -> Any:
        return self.rollouts.StreamRollouts(
            rollout_pb2.StreamRolloutsRequest(
                run_id=request.run_id, batch_id=request.batch_id, cursor=cursor
            ),
            timeout=CALL,
        )

    async def collect(
        self, request: rollout_pb2.SubmitRolloutsRequest, cursor: int = 0
    ) -> list[rollout_pb2.StreamRolloutsResponse]:
        return [event async for event in self.stream(request, cursor)]


class Cluster:
    """Makes gateways and instances on one namespace, and ends them with the test."""

    def __init__(self, redis_url: str, namespace: str) -> None:
        self.redis_url = redis_url
        self.namespace = namespace
        self.stack = AsyncExitStack()
        self.gateways: list[RunningGateway] = []

    async def instance(self, instance_id: str, **kwargs: Any) -> FakeInstance:
        fake = FakeInstance(self.redis_url, self.namespace, instance_id, **kwargs)
        return await self.stack.enter_async_context(fake)

    async def gateway(self, *, leading: bool = True, **settings: Any) -> RunningGateway:
        config = GatewayConfig(
            namespace=self.namespace,
            **{
                **{"redis_url": self.redis_url, "port": 0, "lease_seconds": 1.0, "journal_tokens": 1},
                **settings,
            },
        )
        gateway = RunningGateway(config)
        self.gateways.append(gateway)
        await gateway.start()
        if leading:
            await until(lambda: gateway.gateway.leadership.term is not None, "the gateway leads")
        return gateway

    async def serving(self, gateway: RunningGateway, count: int) -> None:
        """Wait until so many instances serve."""
        await until(lambda: len(gateway.links()) == count, f"{count} instances serve")

    async def close(self) -> None:
        for gateway in self.gateways:
            await gateway.kill()
        await self.stack.aclose()


class RunningGateway:
    """A gateway in this process, with a trainer connected to it."""

    def __init__(self, config: GatewayConfig) -> None:
        self.registry = CollectorRegistry()
        self.gateway = Gateway(config, self.registry)
        self.task: asyncio.Task[None] | None = None
        self.trainer: Trainer

    async def start(self) -> None:
        await self.gateway.start()
        self.task = asyncio.create_task(self.gateway.run())
        self.trainer = Trainer(grpc.aio.insecure_channel(self.gateway.address))

    def links(self) -> dict[str, Any]:
        """Return the links that can be given work."""
        return self.gateway.leadership.term.placer.links if self.gateway.leadership.term else {}

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"paceline_gateway_{name}", labels) or 0.0

    async def kill(self) -> None:
        """End it without any farewell to the journal (the process tests use SIGKILL)."""
        if self.task is None:
            return
        await end([self.task])
        self.task = None
        await self.trainer.channel.close()
        await self.gateway.stop(0)


@pytest.fixture
async def cluster(redis_url: str, namespace: str) -> AsyncIterator[Cluster]:
    cluster = Cluster(redis_url, namespace)
    yield cluster
    await cluster.close()


def make_batch(
    groups: int = 3,
    samples: int = 4,
    *,
    max_tokens: int = 40,
    version: int = 0,
    ignore_eos: bool = False,
    **fields: Any,
) -> rollout_pb2.SubmitRolloutsRequest:
    """Return a batch under a new id."""
    request = rollout_pb2.SubmitRolloutsRequest(
        run_id="run",
        batch_id=uuid.uuid4().hex,
        step=3,
        policy_version=version,
        run_seed=11,
        sampling=sample_pb2.SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos),
        groups=[
            rollout_pb2.Group(prompt_id=f"p{number}", prompt_token_ids=[1, 2, 3 + number], samples=samples)
            for number in range(groups)
        ],
        **fields,
    )
    return request


def check_samples(
    request: rollout_pb2.SubmitRolloutsRequest, events: list[rollout_pb2.StreamRolloutsResponse]
) -> None:
    """Every sample of the batch is there exactly once and equal to what an undisturbed run gives."""
    keys = [(event.sample.prompt_id, event.sample.slot) for event in events]
    wanted = [(group.prompt_id, slot) for group in request.groups for slot in range(group.samples)]
    assert sorted(keys) == sorted(wanted)
    cursors = [event.cursor for event in events]
    assert cursors == sorted(set(cursors))
    assert cursors[0] > 0
    for event in events:
        check_complete(request, event.sample)


def check_complete(request: rollout_pb2.SubmitRolloutsRequest, sample: sample_pb2.Sample) -> None:
    """The sample is complete and equal to what an undisturbed run gives."""
    seed = sample_seed(request.run_seed, request.step, sample.prompt_id, sample.slot)
    limit = request.sampling.max_tokens
    tokens, logprobs = response_of(seed, request.policy_version, limit, request.sampling.ignore_eos)
    assert sample.seed == seed
    assert list(sample.tokens.token_ids) == tokens
    assert list(sample.tokens.logprobs) == logprobs
    truncated = len(tokens) == limit and (request.sampling.ignore_eos or tokens[-1] != 0)
    assert sample.status == (
        sample_pb2.SAMPLE_STATUS_TRUNCATED if truncated else sample_pb2.SAMPLE_STATUS_COMPLETED
    )
    spans = [(span.begin, span.end, span.policy_version) for span in version_spans(sample.tokens.versions)]
    assert spans == [(0, len(tokens), request.policy_version)]
    covered = [(span.begin_token, span.end_token) for span in sample.provenance.instance_spans]
    assert covered[0][0] == 0
    assert covered[-1][1] == len(tokens)
    assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(covered))


async def chunked_tokens(
    redis: Any, namespace: str, request: rollout_pb2.SubmitRolloutsRequest
) -> dict[int, int]:
    """Return how many tokens of each sample are in chunks of the journal; without those that have none."""
    found = await redis.hgetall(BatchKeys(namespace, (request.run_id, request.batch_id)).chunks)
    return {int(name): Head.parse(value.decode()).tokens for name, value in found.items() if b":" not in name}


def details(error: grpc.aio.AioRpcError) -> dict[str, Any]:
    """Return the google.rpc details of an error by the name of their type."""
    (raw,) = [value for key, value in error.trailing_metadata() if key == "grpc-status-details-bin"]
    found: dict[str, Any] = {}
    for detail in status_pb2.Status.FromString(raw).details:
        kind = getattr(error_details_pb2, detail.TypeName().rpartition(".")[2])
        message = kind()
        detail.Unpack(message)
        found[kind.__name__] = message
    return found
