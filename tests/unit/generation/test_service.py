"""The servicer and the instance over a scripted engine: where engine, caller and weights go wrong together."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from google.rpc import code_pb2
from prometheus_client import CollectorRegistry
from safetensors.torch import load_file

from paceline import WeightFolder
from paceline.errors import Violation
from paceline.internal.v1 import generation_pb2 as pb
from paceline.v1 import sample_pb2
from paceline.weights import safetensors
from services.contracts.errors import FailedPrecondition, InvalidArgument, Unavailable
from services.generation.config import GenerationConfig
from services.generation.engine.types import EngineRequest, Verifier
from services.generation.loop.engine_loop import EngineLoop
from services.generation.loop.engine_thread import EngineWork, WorkKind
from services.generation.loop.metrics import EngineMetrics
from services.generation.loop.sample_drafts import SampleDrafts
from services.generation.loop.samples import SampleTable
from services.generation.server.generation_service import GenerationInstance, GenerationService
from services.generation.server.sample_intake import SampleIntake
from services.generation.server.weight_updates import AppliedWeights, WeightUpdates
from services.generation.weights.expansion import GivenWeights
from services.generation.weights.files import Proceed
from services.generation.weights.staging import StagedWeights
from services.generation.weights.stream.metrics import WeightStreamMetrics
from services.platform.redis.connection import Keys
from services.platform.redis.registry import InstanceRecord, Registration
from tests.support.instances import item
from tests.support.models import tiny_model
from tests.support.waiting import until
from tests.unit.generation.scripted import ScriptedEngine, held_up

WAIT = 60.0


def unit_instance(
    config: GenerationConfig, loop: EngineLoop, has_reallocator: Callable[[], Awaitable[bool]]
) -> GenerationInstance:
    """Return an instance that is registered nowhere."""
    record = InstanceRecord("generation", config.instance_id)
    registration = Registration(None, Keys(config.namespace), record)  # type: ignore[arg-type]
    return GenerationInstance(config, loop, registration, has_reallocator)


class Rig:
    """An instance over a scripted engine that steps whenever it has samples."""

    def __init__(self, model: Path, **settings: Any) -> None:
        self.reallocator = False
        self.engine = ScriptedEngine(permits=1 << 30)
        metrics = EngineMetrics(CollectorRegistry())
        config = GenerationConfig(model=str(model), instance_id="unit", **settings)
        self.loop = EngineLoop(
            lambda: (self.engine, SampleDrafts(metrics)),
            metrics,
            SampleTable(metrics.background),
            flush_interval=1,
            max_waiting=8,
        )
        self.loop.start()
        self.loop.ready.result(WAIT)
        self.instance = unit_instance(config, self.loop, self.has_reallocator)
        self.weights = WeightUpdates(
            config, self.loop, lambda: None, None, metrics, WeightStreamMetrics(CollectorRegistry())
        )
        intake = SampleIntake(
            self.loop, self.instance.terms, None, lambda stream, claim: None, metrics.rollouts, 1.0
        )
        self.service = GenerationService(self.instance, intake, self.weights)

    async def has_reallocator(self) -> bool:
        return self.reallocator

    async def work(self, *items: pb.WorkItem) -> list[pb.WorkResponse]:
        """Responses to one request, until each of its items ended or was refused."""
        over = asyncio.Event()

        async def requests() -> AsyncIterator[pb.WorkRequest]:
            yield pb.WorkRequest(start=items)
            await over.wait()

        responses: list[pb.WorkResponse] = []
        async with asyncio.timeout(WAIT):
            async for response in self.service.Work(requests(), None):  # type: ignore[arg-type]
                responses.append(response)
                if sum(len(each.finished) + len(each.refused) for each in responses) == len(items):
                    over.set()
        return responses


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_model(tmp_path / "model", num_hidden_layers=1)


@pytest.fixture
async def rig(model: Path) -> AsyncIterator[Rig]:
    made = Rig(model)
    yield made
    made.loop.stop()
    made.loop.join(WAIT)


def refusals(responses: list[pb.WorkResponse]) -> dict[int, int]:
    return {refused.handle: refused.code for each in responses for refused in each.refused}


def finished(responses: list[pb.WorkResponse]) -> set[int]:
    return {ended.handle for each in responses for ended in each.finished}


async def test_an_item_that_the_engine_will_not_take_is_refused_and_the_rest_taken(rig: Rig) -> None:
    """What is wrong with it is final; what is wrong with the engine may be right on another."""
    for refusal, code in (
        (InvalidArgument([Violation("sampling.top_p", "vLLM knows better")]), code_pb2.INVALID_ARGUMENT),
        (RuntimeError("out of memory"), code_pb2.INTERNAL),
    ):
        rig.engine.refusal = refusal
        responses = await rig.work(*[item(handle, [1], max_tokens=3) for handle in (1, 2, 3)])
        assert refusals(responses) == {1: code}
        assert finished(responses) == {2, 3}


async def test_a_handle_that_is_taken_is_refused_and_its_sample_goes_on(rig: Rig) -> None:
    responses = await rig.work(item(1, [1], max_tokens=3), item(1, [2], max_tokens=3))
    assert refusals(responses) == {1: code_pb2.INVALID_ARGUMENT}
    assert responses[0].refused[0].field == "handle"
    assert finished(responses) == {1}


async def test_a_handle_may_be_used_again_once_its_sample_has_ended(rig: Rig) -> None:
    over = asyncio.Event()

    async def requests() -> AsyncIterator[pb.WorkRequest]:
        yield pb.WorkRequest(start=[item(1, [1], max_tokens=2)])
        await over.wait()
        yield pb.WorkRequest(start=[item(1, [2], max_tokens=4)])
        await asyncio.Event().wait()

    tokens: list[list[int]] = []
    async with asyncio.timeout(WAIT):
        async for response in rig.service.Work(requests(), None):  # type: ignore[arg-type]
            tokens += [list(delta.tokens.token_ids) for delta in response.deltas]
            if response.finished and over.is_set():
                break
            if response.finished:
                over.set()
    assert [token for each in tokens for token in each] == [0, 1, 0, 1, 2, 3]


@pytest.mark.parametrize("lenient_drafts", [False, True])
async def test_an_instance_says_what_lenience_is_of(
    model: Path, lenient_drafts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(model, lenient_drafts=lenient_drafts)
    taken = list[EngineRequest]()

    def add(engine: ScriptedEngine, request: EngineRequest) -> None:
        taken.append(request)
        real(engine, request)

    real = ScriptedEngine.add
    monkeypatch.setattr(ScriptedEngine, "add", add)
    lenient = {"level": sample_pb2.EXACTNESS_LEVEL_LENIENT, "lenience": 1.5}
    assert finished(await rig.work(item(1, [1], max_tokens=2, exactness=lenient))) == {1}
    assert [(each.verifier, each.lenience) for each in taken] == [
        (Verifier.REJECTION if lenient_drafts else Verifier.LENIENT, 1.5)
    ]
    rig.loop.stop()
    rig.loop.join(WAIT)


async def test_a_work_stream_on_a_stopped_engine_is_refused_at_once(rig: Rig) -> None:
    await asyncio.wait_for(asyncio.wrap_future(rig.loop.stop()), WAIT)
    with pytest.raises(Unavailable):
        await rig.work(item(1, [1]))


async def test_weights_that_fail_in_the_engine_end_the_engine(rig: Rig, model: Path) -> None:
    await rig.weights.stage(1, GivenWeights(model))
    rig.engine.apply_fault = RuntimeError("half-loaded")
    with pytest.raises(RuntimeError, match="half-loaded"):
        await rig.weights.apply(1)
    assert rig.loop.broken.result(WAIT) is rig.engine.apply_fault
    with pytest.raises(Unavailable):
        await rig.work(item(1, [1]))
    assert rig.loop.policy_version == 0


async def test_applied_weights_are_the_staged_ones_and_change_the_version(rig: Rig, model: Path) -> None:
    staged = await rig.weights.stage(4, GivenWeights(model))
    assert await rig.weights.apply(4) == AppliedWeights(dropped_blocks=7)
    (applied,) = rig.engine.applied
    assert applied.keys() == staged.tensors.keys()
    assert (rig.loop.policy_version, rig.weights.staged) == (4, None)
    assert await rig.weights.apply(4) == AppliedWeights()
    assert len(rig.engine.applied) == 1
    stale = refusals(await rig.work(item(1, [1], policy_version=0)))
    assert stale == {1: code_pb2.FAILED_PRECONDITION}


async def test_weights_are_read_one_at_a_time_whoever_gives_up(
    rig: Rig, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, gate, reading, together = rig.weights._reader.read, threading.Event(), list[int](), list[int]()

    def gated(version: int, given: GivenWeights, proceed: Proceed) -> StagedWeights:
        reading.append(version)
        together.append(len(reading))
        assert gate.wait(WAIT)
        reading.remove(version)
        return read(version, given, proceed)

    monkeypatch.setattr(rig.weights._reader, "read", gated)
    first = asyncio.create_task(rig.weights.stage(1, GivenWeights(model)))
    await until(lambda: reading == [1], "the first is being read")
    first.cancel()
    second = asyncio.create_task(rig.weights.stage(2, GivenWeights(model)))
    await asyncio.sleep(0)
    gate.set()
    async with asyncio.timeout(WAIT):
        with pytest.raises(asyncio.CancelledError):
            await first
        assert (await second).version == 2
    assert together == [1, 1]
    assert rig.weights.staged is not None
    assert rig.weights.staged.version == 2


async def test_weights_whose_caller_goes_away_are_applied_to_the_end(
    rig: Rig, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply, begun, gate = rig.engine.apply_weights, threading.Event(), threading.Event()

    def gated(*given: Any, **named: Any) -> int:
        begun.set()
        assert gate.wait(WAIT)
        return apply(*given[1:], **named)

    monkeypatch.setattr(ScriptedEngine, "apply_weights", gated)
    await rig.weights.stage(4, GivenWeights(model))
    applying = asyncio.create_task(rig.weights.apply(4))
    await until(begun.is_set, "the engine replaces its weights")
    applying.cancel()
    gate.set()
    async with asyncio.timeout(WAIT):
        await rig.weights.apply(4)
    assert (rig.loop.policy_version, rig.weights.staged, len(rig.engine.applied)) == (4, None, 1)


@pytest.fixture
def root(model: Path) -> Path:
    """A folder of weights: v1 leads out of it, v2 does not; and a link to it, beside it."""
    made = model.parent / "weights"
    made.mkdir()
    (made / "v1").symlink_to(model)
    (made / "v2").mkdir()
    for file in model.glob("*.safetensors"):
        (made / "v2" / file.name).write_bytes(file.read_bytes())
    (model.parent / "link").symlink_to(made)
    return made


async def test_weights_outside_the_root_are_not_read(model: Path, root: Path) -> None:
    rig = Rig(model, weights_root=root)
    for folder in (model, root / "v1", root / "v2" / ".." / ".." / "model"):
        with pytest.raises(InvalidArgument) as refused:
            await rig.weights.stage(1, GivenWeights(folder))
        assert str(root) in refused.value.message
    for folder in (root / "v2", model.parent / "link" / "v2"):
        assert (await rig.weights.stage(1, GivenWeights(folder))).version == 1
    rig.loop.stop()
    rig.loop.join(WAIT)


async def test_an_instance_that_joins_finds_weights_whose_folder_is_gone(model: Path) -> None:
    weights = WeightFolder(model.parent / "weights", model)
    folder = weights.write(1, load_file(model / "model.safetensors"))
    first, second = (Rig(model, adopted_weights=model.parent / "adopted") for _ in range(2))
    staged = await first.weights.stage(1, GivenWeights(folder, safetensors.checksum(folder)))
    shutil.rmtree(folder)
    await first.weights.apply(1)
    await second.weights.stage(1, GivenWeights(folder, staged.checksum))
    await second.weights.apply(1)
    (applied,) = second.engine.applied
    assert applied.keys() == load_file(model / "model.safetensors").keys()
    with pytest.raises(InvalidArgument, match="is not a folder"):
        await second.weights.stage(2, GivenWeights(folder, staged.checksum))
    for rig in (first, second):
        rig.loop.stop()
        rig.loop.join(WAIT)


async def test_adopted_weights_that_are_discarded_are_not_found_again(model: Path) -> None:
    rig, folder = Rig(model, adopted_weights=model.parent / "adopted"), model.parent / "given"
    shutil.copytree(model, folder)
    staged = await rig.weights.stage(1, GivenWeights(folder))
    shutil.rmtree(folder)
    await rig.weights.discard(1)
    with pytest.raises(InvalidArgument, match="is not a folder"):
        await rig.weights.stage(1, GivenWeights(folder, staged.checksum))
    rig.loop.stop()
    rig.loop.join(WAIT)


async def test_nothing_is_applied_that_was_not_staged(rig: Rig, model: Path) -> None:
    with pytest.raises(FailedPrecondition, match="version 1 is not staged") as caught:
        await rig.weights.apply(1)
    assert caught.value.reason == "NOT_STAGED"
    await rig.weights.stage(1, GivenWeights(model))
    await rig.weights.discard(2)
    assert rig.weights.staged is not None
    await rig.weights.discard(1)
    assert rig.weights.staged is None


async def test_a_superseded_version_is_not_there_beside_the_next(
    rig: Rig, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside: list[object] = []

    def read(*_: object) -> None:
        beside.append(rig.weights.staged)
        raise FailedPrecondition("WEIGHTS_NOT_ADOPTED", "the disk is full")

    await rig.weights.stage(1, GivenWeights(model))
    kept = await rig.weights.stage(1, GivenWeights(model))
    monkeypatch.setattr(rig.weights._reader, "read", read)
    with pytest.raises(FailedPrecondition, match="the disk is full"):
        await rig.weights.stage(1, GivenWeights(model))
    with pytest.raises(FailedPrecondition, match="the disk is full"):
        await rig.weights.stage(2, GivenWeights(model))
    assert beside == [kept, None]
    with pytest.raises(FailedPrecondition, match="version 1 is not staged"):
        await rig.weights.apply(1)


async def test_a_command_may_take_longer_than_a_step_and_hangs_without_samples_too(rig: Rig) -> None:
    limits = GenerationConfig(model="any", instance_id="unit")
    async with held_up(rig.loop):
        work = rig.loop.work
        assert work is not None
        began = rig.loop.now
        rig.loop.work = EngineWork(WorkKind.COMMAND, began - limits.step_timeout_seconds - 1)
        assert not rig.instance.hung, "weights are being applied, perhaps"
        rig.loop.work = EngineWork(WorkKind.STEP, began - limits.step_timeout_seconds - 1)
        assert rig.instance.hung
        rig.loop.work = EngineWork(work.kind, began - limits.command_timeout_seconds - 1)
        assert rig.instance.hung
    await rig.instance.pause(True)
    async with asyncio.timeout(WAIT):
        while rig.loop.work is not None:  # noqa: ASYNC110 (the engine thread sets no event)
            await asyncio.sleep(0.001)
    assert not rig.instance.hung, "a thread that waits for commands does not hang"


async def test_a_draining_instance_says_so(rig: Rig) -> None:
    assert rig.instance.state == "serving"
    assert await rig.instance.drain() == 0
    assert rig.instance.state == rig.instance.record().state == "draining"
    answers = await rig.work(item(1, [1]))
    assert refusals(answers) == {1: code_pb2.FAILED_PRECONDITION}
    assert [each.reason for answer in answers for each in answer.refused] == ["INSTANCE_CLOSED"]


async def test_the_record_of_an_instance_can_be_stored(rig: Rig) -> None:
    record = rig.instance.record()
    assert InstanceRecord.from_json(record.to_json()) == record
    assert record.load["step_seconds"] == 0.0
