"""The servicer and the instance over a scripted engine: where engine, caller and weights go wrong together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from google.rpc import code_pb2
from prometheus_client import CollectorRegistry

from paceline.internal.v1 import generation_pb2 as pb
from services.generation.config import GenerationConfig
from services.generation.instance import Applied, Instance
from services.generation.loop import EngineLoop
from services.generation.metrics import EngineMetrics
from services.generation.service import GenerationService
from services.platform.errors import FailedPrecondition, Unavailable
from tests.support.instances import item
from tests.support.models import tiny_model
from tests.unit.generation.scripted import ScriptedEngine

WAIT = 20.0


class Rig:
    """An instance over a scripted engine that steps whenever it has samples."""

    def __init__(self, model: Path, **settings: Any) -> None:
        self.engine = ScriptedEngine(permits=1 << 30)
        metrics = EngineMetrics(CollectorRegistry())
        self.loop = EngineLoop(lambda: self.engine, metrics, flush_interval=1, max_waiting=8)
        self.loop.start()
        self.loop.ready.result(WAIT)
        config = GenerationConfig(model=str(model), instance_id="unit", **settings)
        self.instance = Instance(config, self.loop, metrics)
        self.service = GenerationService(self.instance)

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
    rig.engine.refusal = ValueError("vLLM knows better")
    responses = await rig.work(*[item(handle, [1], max_tokens=3) for handle in (1, 2, 3)])
    assert refusals(responses) == {1: code_pb2.INTERNAL}
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
            tokens += [list(delta.token_ids) for delta in response.deltas]
            if response.finished and over.is_set():
                break
            if response.finished:
                over.set()
    assert [token for each in tokens for token in each] == [0, 1, 0, 1, 2, 3]


async def test_a_work_stream_on_a_stopped_engine_is_refused_at_once(rig: Rig) -> None:
    await asyncio.wait_for(asyncio.wrap_future(rig.loop.stop()), WAIT)
    with pytest.raises(Unavailable):
        await rig.work(item(1, [1]))


async def test_weights_that_fail_in_the_engine_end_the_engine(rig: Rig, model: Path) -> None:
    await rig.instance.stage(1, model, "")
    rig.engine.apply_fault = RuntimeError("half-loaded")
    with pytest.raises(RuntimeError, match="half-loaded"):
        await rig.instance.apply(1)
    assert rig.loop.broken.result(WAIT) is rig.engine.apply_fault
    with pytest.raises(Unavailable):
        await rig.work(item(1, [1]))
    assert rig.loop.policy_version == 0


async def test_applied_weights_are_the_staged_ones_and_change_the_version(rig: Rig, model: Path) -> None:
    staged = await rig.instance.stage(4, model, "")
    assert await rig.instance.apply(4) == Applied(dropped_blocks=7)
    (applied,) = rig.engine.applied
    assert applied.keys() == staged.tensors.keys()
    assert (rig.loop.policy_version, rig.instance.staged) == (4, None)
    assert await rig.instance.apply(4) == Applied()
    assert len(rig.engine.applied) == 1
    stale = refusals(await rig.work(item(1, [1], policy_version=0)))
    assert stale == {1: code_pb2.FAILED_PRECONDITION}


async def test_nothing_is_applied_that_was_not_staged(rig: Rig, model: Path) -> None:
    with pytest.raises(FailedPrecondition, match="version 1 is not staged") as caught:
        await rig.instance.apply(1)
    assert caught.value.reason == "NOT_STAGED"
    await rig.instance.stage(1, model, "")
    rig.instance.discard(2)
    assert rig.instance.staged is not None
    rig.instance.discard(1)
    assert rig.instance.staged is None


async def test_only_an_engine_that_should_be_working_can_hang(rig: Rig, model: Path) -> None:
    rig.loop.last_progress = time.monotonic() - 10_000
    assert not rig.instance.hung
    await rig.instance.pause(True)
    over = asyncio.Event()

    async def requests() -> AsyncIterator[pb.WorkRequest]:
        yield pb.WorkRequest(start=[item(1, [1], max_tokens=3)])
        await over.wait()

    stream = rig.service.Work(requests(), None)  # type: ignore[arg-type]
    reading = asyncio.ensure_future(anext(stream))
    async with asyncio.timeout(WAIT):
        while not rig.loop.sample_count:
            await rig.instance.pause(True)
    rig.loop.last_progress = time.monotonic() - 10_000
    assert not rig.instance.hung
    # As a step that does not return would leave it.
    rig.loop.paused = False
    assert rig.instance.hung
    await rig.instance.pause(False)
    await asyncio.wait_for(reading, WAIT)
    assert not rig.instance.hung
    over.set()
    await stream.aclose()


async def test_a_draining_instance_says_so(rig: Rig) -> None:
    assert rig.instance.state == "serving"
    assert await rig.instance.drain() == 0
    assert rig.instance.state == rig.instance.record().state == "draining"
    assert refusals(await rig.work(item(1, [1]))) == {1: code_pb2.FAILED_PRECONDITION}
