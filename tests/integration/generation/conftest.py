"""One real instance on a tiny model that the tests of this folder share, and what they ask it for."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from paceline.internal.v1 import generation_pb2 as pb
from paceline.internal.v1 import policy_pb2, policy_pb2_grpc
from paceline.v1 import knobs_pb2, weight_pb2
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.instances import CALL, Caller, InstanceProcess, Outcome, calling, generate, item, stub_of
from tests.support.models import VOCAB_SIZE, tiny_model

# Prompts fill several blocks, so that KV is shared through the prefix cache and could be stale.
BLOCK = 32
PROMPT = 100
NAMESPACE = "generation-tests"
ATTEMPTS = 20
# Run of samples that are stopped half done.
MIDWAY = "midway"


@pytest.fixture(scope="package")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two policies of the same shape, the first with a tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    byte_tokenizer(folder / "first", VOCAB_SIZE)
    return tiny_model(folder / "first", seed=0), tiny_model(folder / "second", seed=1)


@pytest.fixture(scope="package")
def start(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., InstanceProcess]:
    """Make instances of one fleet, not yet launched."""

    def make(model: Path, name: str, **settings: Any) -> InstanceProcess:
        folder = tmp_path_factory.mktemp(name)
        common: dict[str, Any] = {"block_size": BLOCK, "namespace": NAMESPACE, "instance_id": name}
        return InstanceProcess(model, redis_url, folder, **(common | settings))

    return make


@pytest.fixture(scope="package")
def step_logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the shared instance logs its steps."""
    return tmp_path_factory.mktemp("steps")


@pytest.fixture(scope="package")
def instance(
    models: tuple[Path, Path], start: Callable[..., InstanceProcess], step_logs: Path
) -> Iterator[InstanceProcess]:
    """The shared instance. Its policy version grows with the tests; its weights are the first model's."""
    with start(models[0], "shared", step_log=step_logs) as process:
        yield process


@pytest.fixture(scope="package")
def replaceable(
    models: tuple[Path, Path], start: Callable[..., InstanceProcess]
) -> Iterator[InstanceProcess]:
    """The process behind `successor`: it drafts nothing, so that a long sample lasts."""
    process = start(models[1], "successor", speculation="off")
    yield process
    process.stop()


@pytest.fixture
def successor(replaceable: InstanceProcess) -> InstanceProcess:
    """An instance started on the second model, which a test may end: the next one gets a new process."""
    if not replaceable.alive:
        replaceable.launch()
        replaceable.wait_ready()
    return replaceable


async def set_knobs(address: str, run_id: str, **knobs: Any) -> None:
    """Set the knobs of a run; all others are the instance's own again."""
    async with grpc.aio.insecure_channel(address) as channel:
        service = policy_pb2_grpc.KnobServiceStub(channel)
        report = await service.GetSpeculationReport(policy_pb2.GetSpeculationReportRequest(), timeout=CALL)
        runs = {run_id: knobs_pb2.Knobs(**knobs)}
        await service.ApplyKnobs(
            policy_pb2.ApplyKnobsRequest(revision=report.revision + 1, runs=runs), timeout=CALL
        )


async def draft_always(address: str, run_id: str) -> None:
    """Drafts of fixed length in a run: a planner on a busy machine may find, rightly or not, that none pay."""
    await set_knobs(address, run_id, mode="fixed")


class Policy:
    """An instance and the version it serves now."""

    def __init__(self, address: str, stub: Any) -> None:
        self.address = address
        self.stub = stub
        self.version = 0

    async def look(self) -> pb.GetStatusResponse:
        """Status; keeps the version."""
        status: pb.GetStatusResponse = await self.stub.GetStatus(pb.GetStatusRequest(), timeout=CALL)
        self.version = status.instance.policy_version
        return status

    async def until_samples(self, samples: int) -> None:
        """Wait until so many samples are in the engine."""
        async with asyncio.timeout(CALL):
            load = (await self.look()).instance.load
            while load.running + load.waiting != samples:
                load = (await self.look()).instance.load

    def item(self, handle: int, prompt: Sequence[int] | None = None, **fields: Any) -> pb.WorkItem:
        """Return an item of the version served; without a prompt, one that belongs to the handle. The seed too."""
        fields = {"policy_version": self.version, "seed": 1000 + handle, "max_tokens": 40} | fields
        return item(handle, prompt_of(handle) if prompt is None else prompt, **fields)

    async def ask(self, *items: pb.WorkItem) -> dict[int, Outcome]:
        """Outcomes of items on a stream of their own."""
        return await generate(self.address, items)

    async def tokens(self, handles: Sequence[int], **fields: Any) -> dict[int, list[int]]:
        """Responses to the handles' own prompts."""
        outcomes = await self.ask(*[self.item(handle, **fields) for handle in handles])
        return {handle: outcome.tokens for handle, outcome in outcomes.items()}

    async def stage(self, version: int, folder: Path, checksum: str = "") -> pb.StageWeightsResponse:
        """Stage the weights in a folder."""
        disk = {"path": str(folder), "checksum": checksum}
        request = pb.StageWeightsRequest(policy_version=version, disk=disk)
        staged: pb.StageWeightsResponse = await self.stub.StageWeights(request, timeout=CALL)
        return staged

    async def apply(
        self, version: int, in_flight: weight_pb2.InFlight = weight_pb2.IN_FLIGHT_REFUSE
    ) -> pb.ApplyWeightsResponse:
        """Apply staged weights."""
        request = pb.ApplyWeightsRequest(policy_version=version, in_flight=in_flight)
        applied: pb.ApplyWeightsResponse = await self.stub.ApplyWeights(request, timeout=CALL)
        await self.look()
        return applied

    async def update(self, folder: Path) -> pb.ApplyWeightsResponse:
        """Serve the weights in a folder as the next version."""
        version = self.version + 1
        await self.stage(version, folder)
        return await self.apply(version)

    async def pause(self) -> None:
        """Stop stepping."""
        await self.stub.PauseEngine(pb.PauseEngineRequest(), timeout=CALL)

    async def resume(self) -> None:
        """Go on stepping."""
        await self.stub.ResumeEngine(pb.ResumeEngineRequest(), timeout=CALL)

    @asynccontextmanager
    async def midway(
        self, handles: Sequence[int], streams: int = 1, begun: int | None = None, **fields: Any
    ) -> AsyncIterator[list[Caller]]:
        """Callers on so many streams, each with these samples: all are half done and the engine is paused.

        With `begun` it is known of the first so many only that they have begun. Drafts have one token here: the
        suffix index may know the samples, and with its long drafts they could end before the pause is heard. If
        one does all the same, all of them are begun again.
        """
        await set_knobs(self.address, MIDWAY, mode="fixed", draft_cap=1)
        for _ in range(ATTEMPTS):
            async with AsyncExitStack() as stack:
                callers = [await stack.enter_async_context(calling(self.address)) for _ in range(streams)]
                for caller in callers:
                    await caller.send([self.item(handle, run_id=MIDWAY, **fields) for handle in handles])
                for caller in callers:
                    await caller.started(*handles[:begun])
                await self.pause()
                load = (await self.look()).instance.load
                if load.running + load.waiting == streams * len(handles):
                    yield callers
                    return
                await self.resume()
                for caller in callers:
                    await caller.ended(*handles)
        pytest.fail(f"samples {list(handles)} always ended before the engine could be paused")


def prompt_of(handle: int) -> list[int]:
    """Return a prompt of the handle's own."""
    chosen = random.Random(handle)
    return [chosen.randrange(2, VOCAB_SIZE) for _ in range(PROMPT)]


@pytest.fixture
async def policy(instance: InstanceProcess) -> AsyncIterator[Policy]:
    """The shared instance, as a caller of its own sees it."""
    async with stub_of(instance.address) as stub:
        policy = Policy(instance.address, stub)
        await policy.look()
        yield policy


@pytest.fixture
async def fresh(successor: InstanceProcess) -> AsyncIterator[Policy]:
    """The successor, as a caller of its own sees it."""
    async with stub_of(successor.address) as stub:
        policy = Policy(successor.address, stub)
        await policy.look()
        yield policy
