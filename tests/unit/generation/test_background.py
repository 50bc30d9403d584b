"""Background samples over a scripted engine: they use what is left, and nothing real ever waits for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from paceline.internal.v1 import generation_pb2 as pb
from paceline.times import seconds_of
from services.contracts.errors import FailedPrecondition, ResourceExhausted, Unavailable
from services.generation.config import GenerationConfig
from services.generation.engine.types import EngineLoad, SampleStep
from services.generation.loop.metrics import BackgroundMetrics, EngineMetrics
from services.generation.loop.sample_drafts import SampleDrafts
from services.generation.loop.samples import SampleTable
from services.generation.loop.work_stream import WorkStream
from services.generation.pregeneration.background import (
    BackgroundReport,
    BackgroundStream,
    EngineAvailability,
)
from services.generation.server.weight_updates import WeightUpdates
from services.generation.weights.expansion import GivenWeights
from services.generation.weights.stream.metrics import WeightStreamMetrics
from tests.support.models import tiny_model
from tests.unit.generation.scripted import ScriptedEngine, held_up, sample_request, scripted_loop, settled
from tests.unit.generation.test_service import unit_instance

WAIT = 60.0
FLUSH = 50.0


@dataclass(slots=True)
class WatchedEngine(ScriptedEngine):
    """Keeps which samples were in the engine at each step, and each thing that was done to it, in order."""

    row_capacity: int = 1 << 20
    batches: list[set[str]] = field(default_factory=list)
    waiting: list[set[str]] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    device_fault: Exception | None = None

    def sleep(self) -> None:
        ScriptedEngine.sleep(self)
        if self.device_fault is not None:
            raise self.device_fault

    def wake(self) -> None:
        if self.asleep and self.device_fault is not None:
            raise self.device_fault
        ScriptedEngine.wake(self)

    def add(self, request: Any) -> None:
        ScriptedEngine.add(self, request)
        self.events.append("add")

    def abort(self, sample_ids: Any) -> None:
        ScriptedEngine.abort(self, sample_ids)
        self.events.append("abort")

    def step(self) -> list[SampleStep]:
        self.batches.append(set(self.requests))
        self.waiting.append(set(list(self.requests)[self.seats :]))
        self.events.append("step")
        return ScriptedEngine.step(self)


class Rig:
    """A loop over a scripted engine with a background stream and a real one; what they report."""

    def __init__(self, engine: WatchedEngine, max_waiting: int = 64, threshold: int = 0) -> None:
        self.engine = engine
        self.registry = CollectorRegistry()
        self.metrics = EngineMetrics(self.registry)
        self.loop = scripted_loop(
            engine,
            SampleDrafts(self.metrics),
            self.metrics,
            threshold=threshold,
            flush_interval=FLUSH,
            max_waiting=max_waiting,
            clock=engine.clock,
        )
        self.loop.start()
        events = asyncio.get_running_loop()
        self.stream = BackgroundStream(events, self.loop.samples, lambda: True)
        self.real = WorkStream(events)
        self.ids: dict[int, str] = {}
        self.reports: list[BackgroundReport] = []
        self.tokens: dict[int, list[int]] = {}
        self.ended: dict[int, bool] = {}
        self.real_at_refusal = 0

    async def call(self, function: Callable[[], Any]) -> Any:
        return await asyncio.wait_for(asyncio.wrap_future(self.loop.call(function)), WAIT)

    async def open(self) -> Rig:
        await self.call(lambda: (self.loop.open(self.stream), self.loop.open(self.real)))
        return self

    async def start(self, handle: int, *, real: bool = False, **fields: Any) -> None:
        stream = self.real if real else self.stream

        def take() -> None:
            request = sample_request(self.loop.next_sample_id(), **fields)
            try:
                self.loop.start_sample(stream, handle, request)
            except FailedPrecondition:
                # The engine may end samples before anyone else can look.
                self.real_at_refusal = self.loop.samples.real_count
                raise
            self.ids[handle] = request.sample_id

        await self.call(take)

    async def step(self, steps: int) -> None:
        """Let the engine step; returns when it has."""
        await self.call(lambda: self.engine.allow(steps))
        while not await self.call(lambda: settled(self.loop)):
            pass

    async def read(self) -> Rig:
        """Take what was reported so far."""
        await asyncio.sleep(0)
        while not self.stream.outbox.empty():
            report = self.stream.outbox.get_nowait()
            if report is None:
                continue
            self.reports.append(report)
            for delta in report.deltas:
                assert delta.handle not in self.ended, "tokens after the end of their sample"
                assert list(delta.tokens.logprobs) == [-float(token) for token in delta.tokens.token_ids]
                self.tokens.setdefault(delta.handle, []).extend(delta.tokens.token_ids)
            for handle, finished in report.ended:
                assert handle not in self.ended, "two ends of one sample"
                self.ended[handle] = finished
        return self

    def real_tokens(self) -> list[int]:
        found = []
        while not self.real.outbox.empty():
            event = self.real.outbox.get_nowait()
            assert isinstance(event, pb.WorkResponse)
            found += [token for delta in event.deltas for token in delta.tokens.token_ids]
        return found

    def value(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"paceline_generation_{name}", labels) or 0.0


@pytest.fixture
async def rigs() -> AsyncIterator[Callable[..., Any]]:
    made: list[Rig] = []

    async def make(engine: WatchedEngine | None = None, **options: Any) -> Rig:
        made.append(await Rig(engine or WatchedEngine(), **options).open())
        return made[-1]

    yield make
    for rig in made:
        rig.loop.stop()
        rig.loop.join(WAIT)
        assert not rig.loop.is_alive()


async def test_background_samples_run_to_their_end_when_nothing_is_wanted(rigs: Callable[..., Any]) -> None:
    rig = await rigs()
    for handle in (1, 2, 3):
        await rig.start(handle, max_tokens=10 * handle)
    await rig.step(30)
    await rig.read()
    assert rig.tokens == {handle: list(range(10 * handle)) for handle in (1, 2, 3)}
    assert rig.ended == {1: True, 2: True, 3: True}


async def test_a_real_sample_ends_them_before_the_next_step_and_their_tokens_are_kept(
    rigs: Callable[..., Any],
) -> None:
    rig = await rigs()
    await rig.start(1, max_tokens=50)
    await rig.start(2, max_tokens=50)
    await rig.step(7)
    taken = len(rig.engine.batches)
    await rig.start(9, real=True, max_tokens=4)
    await rig.step(10)
    await rig.read()
    assert all(batch == {rig.ids[9]} for batch in rig.engine.batches[taken:])
    assert rig.tokens == {1: list(range(7)), 2: list(range(7))}
    assert rig.ended == {1: False, 2: False}
    assert rig.real_tokens() == [0, 1, 2, 3]


async def test_they_yield_while_the_engine_is_stepping_too(rigs: Callable[..., Any]) -> None:
    rig = await rigs()

    def start_both() -> None:
        rig.loop.start_sample(rig.stream, 1, sample_request("endless"))
        rig.engine.allow(1 << 40)

    await rig.call(start_both)
    while "step" not in rig.engine.events:
        await rig.call(lambda: None)
    # The loop never rests from here on; the command comes between two of its steps.
    await rig.start(9, real=True, max_tokens=3)
    added = rig.engine.events.index("add", rig.engine.events.index("step"))
    assert rig.engine.events[added - 1] == "abort"
    await rig.read()
    assert rig.tokens.get(1, []) == list(range(len(rig.tokens.get(1, []))))


async def test_the_time_to_yield_is_measured_from_the_arrival(rigs: Callable[..., Any]) -> None:
    rig = await rigs()
    await rig.start(1, max_tokens=50)
    clock = rig.engine.clock
    start = rig.loop.call(lambda: None)
    await asyncio.wrap_future(start)

    def slow() -> None:
        clock.now += 3.0

    rig.loop.call(slow)
    rig.loop.call(
        lambda: rig.loop.start_sample(rig.real, 9, sample_request(rig.loop.next_sample_id(), max_tokens=1))
    )
    await rig.call(lambda: None)
    assert rig.value("yield_seconds_count") == 1
    assert rig.value("yield_seconds_sum") in (0.0, 3.0)
    assert rig.value("yielded_samples_total") == 1


async def test_none_is_started_beside_real_work(rigs: Callable[..., Any]) -> None:
    rig = await rigs()
    await rig.start(9, real=True, max_tokens=4)
    with pytest.raises(FailedPrecondition, match="real samples"):
        await rig.start(1, max_tokens=4)
    await rig.step(4)
    await rig.start(2, max_tokens=4)
    await rig.step(4)
    assert (await rig.read()).tokens == {2: [0, 1, 2, 3]}


async def test_up_to_the_threshold_they_run_beside_real_samples(rigs: Callable[..., Any]) -> None:
    rig = await rigs(threshold=2)
    for handle in (8, 9):
        await rig.start(handle, real=True, max_tokens=40)
    await rig.start(1, max_tokens=40)
    await rig.step(3)
    assert rig.engine.batches[-1] == {rig.ids[each] for each in (1, 8, 9)}
    await rig.start(10, real=True, max_tokens=40)
    assert rig.engine.aborted == [rig.ids[1]]
    await rig.step(1)
    assert (await rig.read()).tokens == {1: [0, 1, 2]}
    assert rig.value("background_steps_total", beside="real") == 3
    assert rig.value("background_steps_total", beside="nothing") == 0


async def test_a_real_sample_waits_at_most_a_step_for_their_seats(rigs: Callable[..., Any]) -> None:
    rig = await rigs(WatchedEngine(seats=2), threshold=5)
    await rig.start(1, max_tokens=40)
    await rig.start(2, max_tokens=40)
    await rig.step(2)
    await rig.start(9, real=True, max_tokens=4)
    await rig.step(1)
    assert set(rig.engine.aborted) == {rig.ids[1], rig.ids[2]}
    await rig.step(4)
    await rig.read()
    assert rig.real_tokens() == [0, 1, 2, 3]


async def test_the_load_is_that_of_real_samples(rigs: Callable[..., Any]) -> None:
    rig = await rigs(WatchedEngine(seats=4), threshold=1)
    for handle in range(1, 7):
        await rig.start(handle, max_tokens=40)
    await rig.step(3)
    load = rig.loop.load
    assert (load.running, load.waiting, load.kv_usage) == (0, 0, 0)
    assert (load.steps, load.generated_tokens, seconds_of(load.step_time)) == (0, 0, 0)
    assert rig.loop.samples.real_count == 0
    assert rig.loop.samples
    assert rig.value("background_samples") == 6
    assert rig.value("pregenerated_tokens_total") == 12
    assert rig.value("background_seconds_total", beside="nothing") == 30
    assert rig.value("tokens_total") == 0
    await rig.start(9, real=True, max_tokens=40)
    load = rig.loop.load
    assert load.running + load.waiting == 1
    await rig.step(2)
    load = rig.loop.load
    assert (load.running, load.waiting, load.steps, load.generated_tokens) == (1, 0, 2, 1)
    assert rig.value("background_samples") == 0


async def test_they_take_no_place_in_the_queue_of_real_samples(rigs: Callable[..., Any]) -> None:
    rig = await rigs(WatchedEngine(seats=1), max_waiting=1, threshold=3)
    for handle in (1, 2, 3):
        await rig.start(handle, max_tokens=9)
    await rig.start(9, real=True, max_tokens=9)
    await rig.start(10, real=True, max_tokens=9)
    with pytest.raises(ResourceExhausted):
        await rig.start(11, real=True, max_tokens=9)


async def test_abort_all_ends_them_and_counts_the_real_ones(rigs: Callable[..., Any]) -> None:
    rig = await rigs(threshold=5)
    await rig.start(1, max_tokens=9)
    await rig.start(9, real=True, max_tokens=9)
    await rig.step(2)
    assert await rig.call(rig.loop.abort_all) == 1
    await rig.read()
    assert rig.tokens == {1: [0, 1]}
    assert rig.ended == {1: False}
    assert not rig.loop.samples


async def test_a_pause_stops_them_and_loses_nothing(rigs: Callable[..., Any]) -> None:
    rig = await rigs()
    await rig.start(1, max_tokens=9)
    await rig.step(2)

    def pause(paused: bool) -> None:
        rig.loop.paused = paused

    await rig.call(lambda: pause(True))
    await rig.step(20)
    assert len(rig.engine.batches) == 2
    await rig.call(lambda: pause(False))
    await rig.step(0)
    assert (await rig.read()).tokens == {1: list(range(9))}


async def test_one_without_finite_logits_ends_alone(rigs: Callable[..., Any]) -> None:
    rig = await rigs(WatchedEngine(errors={(66,): 3}))
    await rig.start(1, prompt=(66,), max_tokens=9)
    await rig.start(2, max_tokens=9)
    await rig.step(9)
    await rig.read()
    assert rig.ended == {1: False, 2: True}
    assert rig.value("background_samples") == 0


async def test_closing_the_stream_ends_its_samples(rigs: Callable[..., Any]) -> None:
    rig = await rigs()
    await rig.start(1, max_tokens=9)
    await rig.call(lambda: rig.loop.close(rig.stream))
    assert not rig.loop.samples
    assert rig.value("background_samples") == 0


async def test_a_report_comes_every_so_many_steps_and_with_every_end(rigs: Callable[..., Any]) -> None:
    rig = await rigs()
    rig.stream.poll_steps = 5

    def start() -> None:
        rig.loop.start_sample(rig.stream, 1, sample_request("a", max_tokens=22))
        rig.engine.allow(40)

    await rig.call(start)
    await rig.step(0)
    await rig.read()
    grown = [sum(len(each.tokens.token_ids) for each in report.deltas) for report in rig.reports]
    # Flushed every 5 steps of 10 seconds, and at the end.
    assert [each for each in grown if each] == [5, 5, 5, 5, 2]
    assert [report.due for report in rig.reports if report.deltas] == [True] * 4 + [False]


async def test_a_report_says_when_the_engine_is_free_and_when_not(rigs: Callable[..., Any]) -> None:
    rig = await rigs()
    await rig.call(rig.loop.flush)
    await rig.start(9, real=True, max_tokens=8)
    await rig.step(8)
    await rig.read()
    free, serving = EngineAvailability(True, False), EngineAvailability(False, True)
    assert [report.engine for report in rig.reports] == [free, serving, free]


async def test_the_end_of_the_engine_ends_the_stream(rigs: Callable[..., Any]) -> None:
    rig = await rigs()
    await rig.start(1, max_tokens=30)
    await rig.step(2)
    await rig.call(lambda: rig.loop.fail(RuntimeError("gone")))
    rig.loop.join(WAIT)
    await asyncio.sleep(0)
    events = [rig.stream.outbox.get_nowait() for _ in range(rig.stream.outbox.qsize())]
    assert events[-1] is None


async def test_an_engine_with_real_work_does_not_sleep(rigs: Callable[..., Any]) -> None:
    rig = await rigs()
    await rig.start(9, real=True, max_tokens=3)
    assert not await rig.call(rig.loop.sleep)
    assert not rig.loop.asleep


@pytest.mark.parametrize("real", [True, False])
async def test_whatever_is_started_wakes_the_engine_first(rigs: Callable[..., Any], real: bool) -> None:
    rig = await rigs()
    await rig.start(1, max_tokens=30)
    await rig.step(4)
    assert await rig.call(rig.loop.sleep)
    assert rig.loop.asleep
    assert (await rig.read()).tokens == {1: [0, 1, 2, 3]}
    await rig.start(2, real=real, max_tokens=3)
    assert not rig.loop.asleep
    await rig.step(3)
    assert rig.engine.batches[-1] == {rig.ids[2]}


async def test_an_engine_that_cannot_wake_is_given_up(rigs: Callable[..., Any]) -> None:
    rig = await rigs()
    await rig.call(rig.loop.sleep)
    rig.engine.device_fault = MemoryError("the trainer has it")
    with pytest.raises(Unavailable, match="lost its device"):
        await rig.start(9, real=True, max_tokens=3)
    assert rig.loop.broken.result(WAIT) is rig.engine.device_fault


async def test_an_engine_that_fails_to_fall_asleep_is_given_up(rigs: Callable[..., Any]) -> None:
    rig = await rigs()
    rig.engine.device_fault = RuntimeError("half asleep")
    with pytest.raises(Unavailable, match="lost its device"):
        await rig.call(rig.loop.sleep)
    assert rig.loop.broken.result(WAIT) is rig.engine.device_fault


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("real"), st.integers(1, 6)),
        st.tuples(st.just("background"), st.integers(1, 20)),
        st.tuples(st.just("step"), st.integers(1, 5)),
        st.tuples(st.just("sleep"), st.just(0)),
    ),
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(operations=OPERATIONS, threshold=st.integers(0, 2), seats=st.integers(1, 4))
def test_whatever_comes_real_samples_come_first(
    operations: list[tuple[str, int]], threshold: int, seats: int
) -> None:
    asyncio.run(_play(operations, threshold, seats))


async def _play(operations: list[tuple[str, int]], threshold: int, seats: int) -> None:
    rig = await Rig(WatchedEngine(seats=seats), threshold=threshold).open()
    try:
        lengths, background, real, waited = {}, set(), set(), 0
        for handle, (what, size) in enumerate(operations):
            if what == "step":
                await rig.step(size)
            elif what == "sleep":
                await rig.call(rig.loop.sleep)
            else:
                lengths[handle] = size
                try:
                    await rig.start(handle, real=what == "real", max_tokens=size)
                except FailedPrecondition:
                    assert what == "background"
                    assert rig.real_at_refusal > threshold
                    continue
                (real if what == "real" else background).add(rig.ids[handle])
        await rig.step(1 + sum(lengths.values()))
        await rig.read()
        for batch, waiting in zip(rig.engine.batches, rig.engine.waiting, strict=True):
            assert len(batch & real) <= threshold or not batch & background
            # A real sample may meet a full engine for one step.
            hindered = waiting & real and (batch - waiting) & background
            waited = waited + 1 if hindered else 0
            assert waited <= 1
        for handle, tokens in rig.tokens.items():
            assert tokens == list(range(len(tokens)))
            assert len(tokens) == lengths[handle] or not rig.ended[handle]
        assert len(rig.real_tokens()) == sum(lengths[h] for h, name in rig.ids.items() if name in real)
        assert rig.ended.keys() == {h for h, name in rig.ids.items() if name in background}
    finally:
        rig.loop.stop()
        rig.loop.join(WAIT)


def test_the_load_of_real_samples_adds_up() -> None:
    table = SampleTable(BackgroundMetrics(CollectorRegistry()))
    load = EngineLoad(5, 3, 0.5)
    assert table.real_load(load) == load


# -- the instance -----------------------------------------------------------------------------------------


class InstanceRig(Rig):
    """An instance around the loop."""

    def __init__(self, model: Path) -> None:
        super().__init__(WatchedEngine())
        self.loop.ready.result(WAIT)
        config = GenerationConfig(model=str(model), instance_id="unit", speculation="off")
        self.instance = unit_instance(config, self.loop, self.has_reallocator)
        self.weights = WeightUpdates(
            config,
            self.loop,
            lambda: None,
            None,
            EngineMetrics(CollectorRegistry()),
            WeightStreamMetrics(CollectorRegistry()),
        )

    async def has_reallocator(self) -> bool:
        return False


@pytest.fixture
async def instance_rig(tmp_path: Path) -> AsyncIterator[InstanceRig]:
    rig = InstanceRig(tiny_model(tmp_path / "model", num_hidden_layers=1))
    await rig.open()
    yield rig
    rig.loop.stop()
    rig.loop.join(WAIT)


async def test_weights_are_applied_while_background_samples_run(
    instance_rig: InstanceRig, tmp_path: Path
) -> None:
    rig = instance_rig
    await rig.start(1, max_tokens=30)
    await rig.step(3)
    await rig.weights.stage(1, GivenWeights(tmp_path / "model"))
    applied = await rig.weights.apply(1)
    assert applied.dropped_blocks == 7
    assert applied.halt_seconds > 0
    await rig.read()
    assert (rig.tokens, rig.ended) == ({1: [0, 1, 2]}, {1: False})
    assert rig.engine.events[-1] == "abort"
    assert rig.loop.policy_version == 1


async def test_no_time_is_counted_when_nothing_had_to_end(instance_rig: InstanceRig, tmp_path: Path) -> None:
    await instance_rig.weights.stage(1, GivenWeights(tmp_path / "model"))
    assert (await instance_rig.weights.apply(1)).halt_seconds == 0


async def test_real_samples_still_stand_in_the_way_of_weights(
    instance_rig: InstanceRig, tmp_path: Path
) -> None:
    await instance_rig.start(9, real=True, max_tokens=3)
    await instance_rig.weights.stage(1, GivenWeights(tmp_path / "model"))
    with pytest.raises(FailedPrecondition, match="1 samples of version 0"):
        await instance_rig.weights.apply(1)


async def test_weights_wake_the_engine(instance_rig: InstanceRig, tmp_path: Path) -> None:
    rig = instance_rig
    await rig.call(rig.loop.sleep)
    await rig.weights.stage(1, GivenWeights(tmp_path / "model"))
    await rig.weights.apply(1)
    assert not rig.loop.asleep


async def test_a_drain_ends_background_samples_and_hands_back_none(instance_rig: InstanceRig) -> None:
    rig = instance_rig
    await rig.start(1, max_tokens=30)
    await rig.step(3)
    assert await rig.instance.drain() == 0
    assert (await rig.read()).tokens == {1: [0, 1, 2]}
    assert not rig.loop.samples


async def test_a_device_that_hangs_is_noticed_whoever_it_works_for(instance_rig: InstanceRig) -> None:
    rig = instance_rig
    await rig.start(1, max_tokens=30)
    async with held_up(rig.loop):
        rig.engine.clock.now += 10_000
        assert rig.instance.hung
    await rig.call(rig.loop.end_background)
    async with held_up(rig.loop):
        assert not rig.instance.hung, "it has just begun"
        rig.engine.clock.now += 10_000
        assert rig.instance.hung


async def test_weights_that_are_never_through_are_a_hung_engine(
    instance_rig: InstanceRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = instance_rig
    begun, over = threading.Event(), threading.Event()

    def never_through(engine: WatchedEngine, tensors: Any, **how: Any) -> int:
        begun.set()
        over.wait()
        return 0

    monkeypatch.setattr(WatchedEngine, "apply_weights", never_through)
    await rig.weights.stage(1, GivenWeights(tmp_path / "model"))
    applying = asyncio.ensure_future(rig.weights.apply(1))
    try:
        assert await asyncio.to_thread(begun.wait, WAIT)
        assert not rig.instance.hung
        rig.engine.clock.now += 10_000
        assert rig.instance.hung
    finally:
        over.set()
    await applying
    assert rig.loop.policy_version == 1
