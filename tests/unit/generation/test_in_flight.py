"""New weights while samples run: they go on, and every token is reported as of the version that sampled it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from itertools import groupby, islice
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from paceline.columns import mismatch
from paceline.internal.v1 import generation_pb2 as pb
from paceline.v1 import sample_pb2
from services.contracts.errors import Aborted, DataLoss, FailedPrecondition, ServiceError, Unavailable
from services.generation.config import GenerationConfig
from services.generation.engine.model_support import Feature, ModelSupport
from services.generation.server.weight_updates import WeightUpdates
from services.generation.weights.expansion import GivenWeights, WeightReader
from services.generation.weights.files import Proceed
from services.generation.weights.staging import StagedWeights
from services.generation.weights.stream.metrics import WeightStreamMetrics
from tests.support.models import tiny_model
from tests.unit.generation.scripted import ScriptedEngine
from tests.unit.generation.test_loop import WAIT, Caller, Rig

Versioned = list[tuple[int, list[int]]]


class UpdatedRig(Rig):
    """A loop, and the updates of its weights. `unclaimed` counts how often unclaimed samples were ended."""

    def __init__(self, model: Path, engine: ScriptedEngine) -> None:
        super().__init__(engine)
        self.loop.ready.result(WAIT)
        self.model = model
        self.unclaimed = 0
        config = GenerationConfig(model=str(model), instance_id="unit", speculation="off")
        streams = WeightStreamMetrics(CollectorRegistry())
        self.weights = WeightUpdates(config, self.loop, self._end_unclaimed, None, self.metrics, streams)

    def _end_unclaimed(self) -> None:
        self.unclaimed += 1

    async def update(self, version: int, *, in_flight: bool = True, keep_kv: bool = False) -> int:
        """Stage and apply a version; returns the samples that go on."""
        await self.weights.stage(version, GivenWeights(self.model))
        return (await self.weights.apply(version, in_flight=in_flight, keep_kv=keep_kv)).continued


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[UpdatedRig]:
    made = UpdatedRig(tiny_model(tmp_path / "model", num_hidden_layers=1), ScriptedEngine(seats=2))
    yield made
    made.loop.stop()
    made.loop.join(WAIT)


def versioned(caller: Caller, handle: int) -> Versioned:
    """Return the tokens of a sample as its stream was told of them, by version."""
    found: Versioned = []
    for delta in (delta for told in caller.stream.told for delta in told.deltas if delta.handle == handle):
        assert not mismatch(delta.tokens)
        tokens = iter(delta.tokens.token_ids)
        for run in delta.tokens.versions:
            if not found or found[-1][0] != run.policy_version:
                found.append((run.policy_version, []))
            found[-1][1].extend(islice(tokens, run.tokens))
    return found


async def test_samples_go_on_and_their_tokens_are_of_the_version_that_sampled_them(rig: UpdatedRig) -> None:
    caller = await rig.open()
    for handle in (1, 2, 3):
        await caller.start(handle, max_tokens=6)
    await rig.step(2)
    assert await rig.update(1) == 3
    assert (len(rig.engine.applied), rig.unclaimed) == (1, 1)
    await rig.step(10)
    assert await rig.update(2) == 0
    assert versioned(caller, 1) == versioned(caller, 2) == [(0, [0, 1]), (1, [2, 3, 4, 5])]
    # The third waited for a seat.
    assert versioned(caller, 3) == [(1, [0, 1, 2, 3, 4, 5])]
    await caller.start(4, max_tokens=2)
    await rig.step(2)
    assert versioned(caller, 4) == [(2, [0, 1])]


def marks(caller: Caller, handle: int) -> list[tuple[int, bool]]:
    """Return the versions of a sample's tokens, and whether they are marked as of mixed KV, in order."""
    deltas = (delta for told in caller.stream.told for delta in told.deltas if delta.handle == handle)
    runs = (run for delta in deltas for run in delta.tokens.versions)
    return [each for each, _ in groupby((run.policy_version, run.mixed_kv) for run in runs)]


async def test_samples_that_keep_their_kv_are_marked_until_an_update_takes_it(rig: UpdatedRig) -> None:
    caller = await rig.open()
    decoding = [await caller.start(handle, max_tokens=6) for handle in (1, 2)]
    waiting = await caller.start(3, max_tokens=6)
    await rig.step(2)
    assert await rig.update(1, keep_kv=True) == 3
    await rig.step(1)
    assert await rig.update(2, keep_kv=True) == 3
    await rig.step(1)
    assert await rig.update(3) == 3
    await rig.step(10)
    assert rig.engine.kept == [{*decoding}, {*decoding}, set()]
    assert waiting not in rig.engine.kept[0], "it has sampled nothing"
    assert marks(caller, 1) == marks(caller, 2) == [(0, False), (1, True), (2, True), (3, False)]
    assert versioned(caller, 1) == [(0, [0, 1]), (1, [2]), (2, [3]), (3, [4, 5])]
    assert marks(caller, 3) == [(3, False)]


async def test_kv_is_not_kept_for_a_model_that_refuses_it(rig: UpdatedRig) -> None:
    rig.engine.support = ModelSupport({Feature.KEEP_KV: "a layer keeps a state"})
    caller = await rig.open()
    await caller.start(1, max_tokens=4)
    await rig.step(2)
    with pytest.raises(
        FailedPrecondition, match="instance unit keeps no KV: a layer keeps a state"
    ) as refused:
        await rig.update(1, keep_kv=True)
    assert (refused.value.reason, rig.engine.applied, rig.loop.policy_version) == ("KV_NOT_KEPT", [], 0)
    # They are still staged.
    assert (await rig.weights.apply(1, in_flight=True)).continued == 1
    await rig.step(2)
    assert marks(caller, 1) == [(0, False), (1, False)]


async def test_tokens_that_a_slow_caller_has_not_taken_keep_their_version(rig: UpdatedRig) -> None:
    caller = await rig.open()
    await caller.start(1, max_tokens=6)
    await rig.step(2)
    await rig.update(1)
    await rig.step(4)
    response = caller.stream.outbox.get_nowait()
    assert isinstance(response, pb.WorkResponse)
    (delta,) = response.deltas
    assert list(delta.tokens.token_ids) == [0, 1, 2, 3, 4, 5]
    assert [(run.tokens, run.policy_version) for run in delta.tokens.versions] == [(2, 0), (4, 1)]


async def test_weights_that_are_given_up_while_they_are_read_hold_up_no_others(
    rig: UpdatedRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, ended = threading.Event(), list[type]()

    def endless(_: WeightReader, version: int, given: GivenWeights, proceed: Proceed) -> StagedWeights:
        began.set()
        try:
            while True:
                proceed()
        except ServiceError as error:
            ended.append(type(error))
            raise

    with monkeypatch.context() as patched:
        patched.setattr(WeightReader, "read", endless)
        staging = asyncio.create_task(rig.weights.stage(1, GivenWeights(rig.model)))
        assert await asyncio.to_thread(began.wait, WAIT)
    staging.cancel()
    async with asyncio.timeout(WAIT):
        assert await rig.update(2) == 0
    assert staging.cancelled()
    assert ended == [Aborted]
    assert rig.loop.policy_version == 2


async def test_samples_that_are_not_to_go_on_keep_the_weights_they_have(rig: UpdatedRig) -> None:
    caller = await rig.open()
    await caller.start(1, max_tokens=4)
    await rig.step(2)
    with pytest.raises(FailedPrecondition, match="1 samples of version 0") as refused:
        await rig.update(1, in_flight=False)
    assert refused.value.reason == "SAMPLES_RUNNING"
    assert (rig.engine.applied, rig.loop.policy_version) == ([], 0)
    # They are still staged.
    assert (await rig.weights.apply(1, in_flight=True)).continued == 1
    await rig.step(2)
    assert versioned(caller, 1) == [(0, [0, 1]), (1, [2, 3])]


async def test_a_sample_that_is_being_moved_is_handed_back(rig: UpdatedRig) -> None:
    caller, left = await rig.open(), list[bool]()
    moving = await caller.start(1, max_tokens=6)
    await caller.start(2, max_tokens=6)
    await rig.step(2)
    await rig.call(lambda: rig.loop.watchers.__setitem__(moving, left.append))
    assert await rig.update(1) == 1
    await caller.read()
    assert left == [False], "the move learns that it is over"
    assert caller.finished[1].finish_reason == sample_pb2.FINISH_REASON_ABORTED
    assert caller.tokens[1] == [0, 1]
    await rig.step(10)
    assert versioned(caller, 2) == [(0, [0, 1]), (1, [2, 3, 4, 5])]


async def test_weights_that_break_the_engine_lose_no_token_of_the_old_version(rig: UpdatedRig) -> None:
    rig.engine.apply_fault = RuntimeError("half loaded")
    caller = await rig.open()
    await caller.start(1, max_tokens=6)
    await rig.step(2)
    with pytest.raises(RuntimeError, match="half loaded"):
        await rig.update(1)
    await asyncio.to_thread(rig.loop.join, WAIT)
    await caller.read()
    assert versioned(caller, 1) == [(0, [0, 1])]
    assert isinstance(caller.end, Unavailable)


async def test_weights_that_changed_since_they_were_checked_disturb_no_sample(rig: UpdatedRig) -> None:
    caller = await rig.open()
    await caller.start(1, max_tokens=4)
    await rig.step(2)
    await rig.weights.stage(1, GivenWeights(rig.model))
    file = rig.model / "model.safetensors"
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(DataLoss):
        await rig.weights.apply(1, in_flight=True)
    await rig.step(2)
    assert versioned(caller, 1) == [(0, [0, 1, 2, 3])]
    assert caller.stream.samples == {}


async def test_background_samples_end(rig: UpdatedRig) -> None:
    caller = await rig.open()
    caller.stream.background = True
    await caller.start(1, max_tokens=6)
    await rig.step(2)
    assert await rig.update(1) == 0
    await caller.read()
    assert (caller.tokens[1], 1 in caller.finished) == ([0, 1], True)
    assert not rig.loop.samples
