"""The engine loop over a scripted engine: what a caller gets of its samples, whatever happens to the engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from paceline.internal.v1 import generation_pb2 as pb
from paceline.times import seconds_of
from paceline.v1 import sample_pb2
from services.contracts.errors import ResourceExhausted, ServiceError, Unavailable
from services.contracts.rollout import RolloutKind
from services.generation.draft_cache.cache import DraftCache
from services.generation.draft_cache.origin import NOWHERE, Origin
from services.generation.drafters.reference.drafter import ReferenceDrafter
from services.generation.engine.types import Verifier
from services.generation.loop.engine_loop import EngineLoop
from services.generation.loop.engine_thread import EngineWork, WorkKind
from services.generation.loop.metrics import EngineMetrics
from services.generation.loop.sample_drafts import SampleDrafts
from services.generation.loop.samples import SampleTable
from services.generation.loop.work_stream import CheckpointRules, OutboxEvent, WorkStream
from services.generation.speculation.drafter import TokenDrafter
from services.generation.speculation.plan import FixedLengthPlanner
from services.generation.speculation.speculation import Speculation
from tests.unit.generation.rollouts import rollout
from tests.unit.generation.scripted import ScriptedEngine, sample_request, scripted_loop, settled

WAIT = 60.0
FLUSH = 50.0


class Rig:
    """A running loop over a scripted engine."""

    def __init__(self, engine: ScriptedEngine, max_waiting: int = 64) -> None:
        self.engine = engine
        self.clock = engine.clock
        self.registry = CollectorRegistry()
        self.metrics = EngineMetrics(self.registry)
        self.drafts = SampleDrafts(self.metrics)
        self.loop = scripted_loop(
            engine,
            self.drafts,
            self.metrics,
            flush_interval=FLUSH,
            max_waiting=max_waiting,
            clock=engine.clock,
        )
        self.loop.start()

    async def call(self, function: Callable[[], Any]) -> Any:
        return await asyncio.wait_for(asyncio.wrap_future(self.loop.call(function)), WAIT)

    async def step(self, steps: int) -> None:
        """Let the engine step; returns when it has."""
        await self.call(lambda: self.engine.allow(steps))
        while not await self.call(lambda: settled(self.loop)):
            pass

    async def open(self, rules: CheckpointRules | None = None) -> Caller:
        stream = ToldStream(asyncio.get_running_loop(), rules)
        await self.call(lambda: self.loop.open(stream))
        return Caller(self, stream)

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)


class ToldStream(WorkStream):
    """A stream that keeps the responses as they went into the outbox, which merges them until they are read."""

    def __init__(self, events: asyncio.AbstractEventLoop, rules: CheckpointRules | None = None) -> None:
        super().__init__(events, rules)
        self.told: list[pb.WorkResponse] = []

    def put(self, event: OutboxEvent) -> None:
        if isinstance(event, pb.WorkResponse):
            self.told.append(pb.WorkResponse.FromString(event.SerializeToString()))
        super().put(event)


class Caller:
    """A stream and what came out of it."""

    def __init__(self, rig: Rig, stream: ToldStream) -> None:
        self.rig = rig
        self.stream = stream
        self.responses: list[pb.WorkResponse] = []
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, pb.Finished] = {}
        self.refused: dict[int, pb.Refused] = {}
        self.end: Exception | str | None = "open"

    async def start(self, handle: int, **fields: Any) -> str:
        loop = self.rig.loop

        def take() -> str:
            origin = fields.pop("origin", NOWHERE)
            request = sample_request(loop.next_sample_id(), **fields)
            loop.start_sample(self.stream, handle, request, origin)
            return request.sample_id

        return str(await self.rig.call(take))

    async def abort(self, *handles: int) -> int:
        loop, samples = self.rig.loop, self.stream.samples
        return int(await self.rig.call(lambda: loop.abort_samples([samples[handle] for handle in handles])))

    async def read(self) -> Caller:
        """Take everything that was sent so far."""
        await asyncio.sleep(0)
        while not self.stream.outbox.empty():
            self._take(self.stream.outbox.get_nowait())
        return self

    async def wait_next(self) -> Caller:
        """Take what is sent next: the engine thread may not have come to it yet."""
        self._take(await asyncio.wait_for(self.stream.outbox.get(), WAIT))
        return self

    async def wait_end(self) -> Caller:
        """Take everything up to the end of the stream."""
        while self.end == "open":
            self._take(await asyncio.wait_for(self.stream.outbox.get(), WAIT))
        return self

    def _take(self, event: pb.WorkResponse | Exception | None) -> None:
        assert self.end == "open", "an event after the end of the stream"
        if not isinstance(event, pb.WorkResponse):
            self.end = event
            return
        self.responses.append(event)
        for delta in event.deltas:
            assert delta.handle not in self.finished, "tokens after the end of their sample"
            assert list(delta.tokens.logprobs) == [-float(token) for token in delta.tokens.token_ids]
            self.tokens.setdefault(delta.handle, []).extend(delta.tokens.token_ids)
        for finished in event.finished:
            assert finished.handle not in self.finished, "two ends of one sample"
            self.finished[finished.handle] = finished
        self.refused |= {refused.handle: refused for refused in event.refused}


@pytest.fixture
async def rigs() -> AsyncIterator[Callable[..., Rig]]:
    """Make loops and end them with the test."""
    made: list[Rig] = []

    def make(engine: ScriptedEngine | None = None, **settings: Any) -> Rig:
        made.append(Rig(engine or ScriptedEngine(), **settings))
        return made[-1]

    yield make
    for rig in made:
        rig.loop.stop()
        rig.loop.join(WAIT)
        assert not rig.loop.is_alive()


def lengths(caller: Caller, handle: int) -> list[int]:
    """Tokens of a sample in each response that has some."""
    told = caller.stream.told
    return [len(d.tokens.token_ids) for response in told for d in response.deltas if d.handle == handle]


async def test_every_sample_gets_its_tokens_once_and_then_its_end(rigs: Callable[..., Rig]) -> None:
    rig = rigs()
    caller = await rig.open()
    for handle in range(1, 9):
        await caller.start(handle, max_tokens=handle * 2)
    await rig.step(20)
    await caller.read()
    assert caller.tokens == {handle: list(range(handle * 2)) for handle in range(1, 9)}
    assert caller.finished.keys() == caller.tokens.keys()
    assert all(f.finish_reason == sample_pb2.FINISH_REASON_LENGTH for f in caller.finished.values())
    assert [caller.finished[handle].decode_steps for handle in (1, 8)] == [2, 16]
    assert not caller.stream.samples


async def test_only_the_loops_own_thread_touches_the_engine(rigs: Callable[..., Rig]) -> None:
    rig = rigs()
    caller = await rig.open()
    await caller.start(1, max_tokens=3)
    await rig.step(3)
    assert rig.engine.threads == {rig.loop.ident}
    assert rig.loop.ident != threading.get_ident()


async def test_tokens_are_sent_once_in_a_flush_interval(rigs: Callable[..., Rig]) -> None:
    rig = rigs()
    caller = await rig.open()

    # One command, so that the loop is not idle in between: an idle loop flushes at once.
    def start() -> None:
        rig.loop.start_sample(caller.stream, 1, sample_request("s", max_tokens=12))
        rig.engine.allow(12)

    await rig.call(start)
    await rig.step(0)
    await caller.read()
    assert lengths(caller, 1) == [5, 5, 2]
    assert [len(response.finished) for response in caller.stream.told] == [0, 0, 1]


async def test_what_is_not_streamed_reports_in_checkpoints_and_at_its_end(rigs: Callable[..., Rig]) -> None:
    rig = rigs()
    caller = await rig.open(CheckpointRules(tokens=8, seconds=1e6))

    def start() -> None:
        for handle in (1, 2):
            request = sample_request(f"s{handle}", max_tokens=42)
            rig.loop.start_sample(caller.stream, handle, request, streamed=handle == 1)
        rig.engine.allow(42)

    await rig.call(start)
    await rig.step(0)
    await caller.read()
    assert lengths(caller, 1) == [5] * 8 + [2]
    first, *others, last = lengths(caller, 2)
    # Looked at after every fifth step.
    assert first in (5, 10)
    assert set(others) == {10}
    assert last < 12
    assert caller.tokens == {handle: list(range(42)) for handle in (1, 2)}


async def test_times_of_a_sample_are_those_of_the_clock(rigs: Callable[..., Rig]) -> None:
    rig = rigs(ScriptedEngine(seats=1))
    caller = await rig.open()
    await caller.start(1, max_tokens=2)
    await caller.start(2, max_tokens=3)
    await rig.step(9)
    await caller.read()
    second = caller.finished[2]
    assert (seconds_of(second.queue_time), seconds_of(second.generation_time)) == (20.0, 30.0)
    assert seconds_of(caller.finished[1].queue_time) == 0.0


async def test_context_that_is_computed_again_is_counted(rigs: Callable[..., Rig]) -> None:
    rig = rigs(ScriptedEngine(contexts={(7, 7, 7): [2, None, 4, None]}))
    caller = await rig.open()
    await caller.start(1, prompt=(7, 7, 7), max_tokens=4)
    await rig.step(4)
    # A prompt of three, and after two tokens five that were preempted.
    assert rig.value("paceline_generation_context_tokens_total") == 3 + 5
    assert rig.value("paceline_generation_cached_context_tokens_total") == 2 + 4
    assert rig.value("paceline_generation_preemptions_total") == 1


async def test_abort_returns_the_tokens_so_far_and_leaves_the_others(rigs: Callable[..., Rig]) -> None:
    rig = rigs()
    caller = await rig.open()
    first = await caller.start(1, max_tokens=10)
    await caller.start(2, max_tokens=10)
    await rig.step(4)
    assert await caller.abort(1) == 1
    await caller.read()
    assert caller.finished[1].finish_reason == sample_pb2.FINISH_REASON_ABORTED
    assert rig.engine.aborted == [first]
    await rig.step(10)
    await caller.read()
    assert caller.tokens == {1: [0, 1, 2, 3], 2: list(range(10))}
    assert caller.finished[2].finish_reason == sample_pb2.FINISH_REASON_LENGTH


async def test_aborting_a_sample_that_waits_returns_no_tokens(rigs: Callable[..., Rig]) -> None:
    rig = rigs(ScriptedEngine(seats=1))
    caller = await rig.open()
    await caller.start(1, max_tokens=10)
    await caller.start(2, max_tokens=10)
    await rig.step(3)
    await caller.abort(2)
    await caller.read()
    assert 2 not in caller.tokens
    assert caller.finished[2].decode_steps == 0
    assert seconds_of(caller.finished[2].generation_time) == 0


async def test_aborting_a_sample_that_has_ended_does_nothing(rigs: Callable[..., Rig]) -> None:
    rig = rigs()
    caller = await rig.open()
    await caller.start(1, max_tokens=5)
    ended = caller.stream.samples[1]
    await rig.step(5)
    assert await rig.call(lambda: rig.loop.abort_samples([ended])) == 0
    await caller.read()
    assert list(caller.finished) == [1]


async def test_abort_all_ends_the_samples_of_every_stream(rigs: Callable[..., Rig]) -> None:
    rig = rigs()
    callers = [await rig.open(), await rig.open()]
    for caller in callers:
        await caller.start(1, max_tokens=10)
    await rig.step(2)
    assert await rig.call(rig.loop.abort_all) == 2
    for caller in callers:
        await caller.read()
        assert caller.tokens == {1: [0, 1]}
        assert caller.finished[1].finish_reason == sample_pb2.FINISH_REASON_ABORTED
    assert rig.loop.samples.real_count == 0


async def test_a_closed_stream_takes_its_samples_along_and_no_others(rigs: Callable[..., Rig]) -> None:
    rig = rigs()
    gone, stays = await rig.open(), await rig.open()
    orphan = await gone.start(7, max_tokens=10)
    await stays.start(7, max_tokens=10)
    await rig.step(2)
    await gone.read()
    await rig.call(lambda: rig.loop.close(gone.stream))
    await rig.step(10)
    await stays.read()
    assert rig.engine.aborted == [orphan]
    assert stays.tokens == {7: list(range(10))}
    assert gone.stream.outbox.empty()
    assert rig.loop.samples.real_count == 0


async def test_pause_delivers_what_there_is_and_resume_goes_on(rigs: Callable[..., Rig]) -> None:
    rig = rigs()
    caller = await rig.open()
    await caller.start(1, max_tokens=6)
    await rig.step(2)

    def pause(paused: bool) -> None:
        rig.loop.paused = paused

    await rig.call(lambda: pause(True))
    await rig.call(lambda: rig.engine.allow(10))
    await caller.start(2, max_tokens=2)
    await caller.wait_next()
    assert caller.tokens == {1: [0, 1]}
    assert rig.loop.load.steps == 2
    await rig.call(lambda: pause(False))
    await rig.step(0)
    await caller.read()
    assert caller.tokens == {1: list(range(6)), 2: [0, 1]}


async def test_a_complete_prefix_ends_at_once_and_never_reaches_the_engine(rigs: Callable[..., Rig]) -> None:
    rig = rigs()
    caller = await rig.open()
    await caller.start(1, max_tokens=4, prefix=(0, 1, 2, 3))
    await rig.call(rig.loop.flush)
    await caller.read()
    assert caller.finished[1].finish_reason == sample_pb2.FINISH_REASON_LENGTH
    assert caller.tokens == {}
    assert not caller.stream.samples
    assert not rig.engine.requests


async def test_a_prefix_is_not_sent_back(rigs: Callable[..., Rig]) -> None:
    rig = rigs()
    caller = await rig.open()
    await caller.start(1, max_tokens=6, prefix=(0, 1, 2, 3))
    await rig.step(5)
    await caller.read()
    assert caller.tokens == {1: [4, 5]}


async def test_a_full_queue_refuses_and_takes_again_when_there_is_room(rigs: Callable[..., Rig]) -> None:
    rig = rigs(ScriptedEngine(seats=1), max_waiting=1)
    caller = await rig.open()
    await caller.start(1, max_tokens=2)
    await caller.start(2, max_tokens=2)
    with pytest.raises(ResourceExhausted, match="1 samples are waiting"):
        await caller.start(3, max_tokens=2)
    assert 3 not in caller.stream.samples
    await rig.step(2)
    await caller.start(3, max_tokens=2)
    await rig.step(8)
    await caller.read()
    assert caller.finished.keys() == {1, 2, 3}


async def test_a_sample_that_the_engine_will_not_take_leaves_no_trace(rigs: Callable[..., Rig]) -> None:
    rig = rigs()
    caller = await rig.open()
    rig.engine.refusal = ValueError("no")
    with pytest.raises(ValueError, match="no"):
        await caller.start(1, max_tokens=2)
    assert not caller.stream.samples
    assert rig.loop.samples.real_count == 0
    await caller.start(1, max_tokens=2)
    await rig.step(2)
    assert (await caller.read()).tokens == {1: [0, 1]}


async def test_a_sample_without_finite_logits_is_refused_alone(rigs: Callable[..., Rig]) -> None:
    rig = rigs(ScriptedEngine(errors={(66,): 5}))
    caller = await rig.open()
    await caller.start(1, prompt=(66,), max_tokens=10, prefix=(0, 1))
    await caller.start(2, max_tokens=10)
    await rig.step(12)
    await caller.read()
    refused = caller.refused[1]
    assert (refused.code, refused.field) == (grpc.StatusCode.DATA_LOSS.value[0], "")
    assert "response position 5" in refused.message
    assert caller.finished.keys() == {2}
    assert caller.tokens[2] == list(range(10))
    assert not caller.stream.samples


async def test_a_sample_that_its_schema_has_no_token_for_blames_the_schema(rigs: Callable[..., Rig]) -> None:
    rig = rigs(ScriptedEngine(errors={(66,): 5}))
    caller = await rig.open()
    await caller.start(1, prompt=(66,), max_tokens=10, json_schema="{}")
    await rig.step(12)
    await caller.read()
    assert caller.refused[1].code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert caller.refused[1].field == "sampling.json_schema"
    assert "response position 5" in caller.refused[1].message


async def test_a_step_that_raises_ends_every_stream_after_its_tokens(rigs: Callable[..., Rig]) -> None:
    rig = rigs()
    callers = [await rig.open(), await rig.open(), await rig.open()]
    for caller in callers[:2]:
        await caller.start(1, max_tokens=20)
    await rig.step(3)
    fault = RuntimeError("the device is gone")

    def break_engine() -> None:
        rig.engine.fault = fault
        rig.engine.allow(1)

    await rig.call(break_engine)
    for caller in callers:
        await caller.wait_end()
        assert isinstance(caller.end, Unavailable)
    assert [caller.tokens for caller in callers] == [{1: [0, 1, 2]}, {1: [0, 1, 2]}, {}]
    assert not any(caller.finished for caller in callers)
    assert rig.loop.broken.result(WAIT) is fault


async def test_tokens_that_were_not_flushed_yet_survive_the_engine(rigs: Callable[..., Rig]) -> None:
    rig = rigs()
    caller = await rig.open()
    engine = rig.engine
    plain_step = engine.step

    def step_then_break() -> Any:
        if engine.responses and len(next(iter(engine.responses.values()))) == 3:
            raise RuntimeError("broken")
        return plain_step()

    rig.loop._engine = _Stepping(engine, step_then_break)

    def start() -> None:
        rig.loop.start_sample(caller.stream, 1, sample_request("s", max_tokens=9))
        engine.allow(9)

    await rig.call(start)
    await caller.wait_end()
    assert lengths(caller, 1) == [3]


class _Stepping:
    """An engine with another `step`."""

    def __init__(self, engine: ScriptedEngine, step: Callable[[], Any]) -> None:
        self._engine = engine
        self.step = step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


async def test_an_engine_too_broken_to_tell_its_load_still_ends_its_streams(
    monkeypatch: pytest.MonkeyPatch, rigs: Callable[..., Rig]
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    rig = rigs()
    caller = await rig.open()
    await caller.start(1, max_tokens=20)

    def break_engine() -> None:
        rig.engine.fault = rig.engine.load_fault = RuntimeError("gone")
        rig.engine.allow(1)

    await rig.call(break_engine)
    await caller.wait_end()
    assert isinstance(caller.end, Unavailable)
    assert str(rig.loop.broken.result(WAIT)) == "gone"


async def test_fail_gives_the_engine_up_as_a_failed_step_does(rigs: Callable[..., Rig]) -> None:
    rig = rigs()
    caller = await rig.open()
    error = RuntimeError("half-loaded weights")
    assert await rig.call(lambda: rig.loop.fail(error)) is None
    await caller.wait_end()
    assert isinstance(caller.end, Unavailable)
    assert rig.loop.broken.result(WAIT) is error


async def test_no_call_waits_for_a_broken_engine(rigs: Callable[..., Rig]) -> None:
    rig = rigs()
    gate = threading.Event()
    behind: list[Future[int]] = []

    def break_engine() -> None:
        gate.wait(WAIT)
        rig.loop.fail(RuntimeError("gone"))

    rig.loop.call(break_engine)
    behind = [rig.loop.call(lambda: 1) for _ in range(3)]
    gate.set()
    rig.loop.join(WAIT)
    for future in [*behind, rig.loop.call(lambda: 1)]:
        assert isinstance(future.exception(WAIT), Unavailable)


async def test_a_caller_that_gives_up_on_a_call_does_not_harm_the_engine(rigs: Callable[..., Rig]) -> None:
    rig = rigs()
    caller = await rig.open()
    await caller.start(1, max_tokens=3)
    gate, ran = threading.Event(), threading.Event()
    rig.loop.call(lambda: gate.wait(WAIT))
    given_up = rig.loop.call(ran.set)
    assert given_up.cancel()
    gate.set()
    await rig.step(3)
    assert (await caller.read()).tokens == {1: [0, 1, 2]}
    assert not ran.is_set()
    assert not rig.loop.broken.done()


async def test_a_call_that_raises_raises_for_its_caller_only(rigs: Callable[..., Rig]) -> None:
    rig = rigs()

    def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await rig.call(fail)
    assert await rig.call(lambda: 3) == 3


async def test_stop_flushes_ends_the_streams_and_the_thread(rigs: Callable[..., Rig]) -> None:
    rig = rigs()
    caller = await rig.open()
    await caller.start(1, max_tokens=9)
    await rig.step(2)
    await asyncio.wait_for(asyncio.wrap_future(rig.loop.stop()), WAIT)
    await caller.wait_end()
    assert caller.end is None
    assert caller.tokens == {1: [0, 1]}
    rig.loop.join(WAIT)
    assert not rig.loop.is_alive()
    assert not rig.loop.broken.done()
    with pytest.raises(Unavailable):
        await rig.call(lambda: None)


def test_an_engine_that_cannot_be_built_is_told_through_ready() -> None:
    error = MemoryError("no room for the weights")

    def factory() -> Any:
        raise error

    metrics = EngineMetrics(CollectorRegistry())
    samples = SampleTable(metrics.background)
    loop = EngineLoop(factory, metrics, samples, flush_interval=1, max_waiting=1)
    loop.start()
    assert loop.ready.exception(WAIT) is error
    loop.join(WAIT)
    assert isinstance(loop.call(lambda: None).exception(WAIT), ServiceError)
    assert loop.load.running == 0


async def test_a_command_after_a_long_rest_has_just_begun(rigs: Callable[..., Rig]) -> None:
    rig = rigs()
    await rig.call(lambda: None)
    rig.clock.now = 10_000.0
    assert await rig.call(lambda: rig.loop.work) == EngineWork(WorkKind.COMMAND, 10_000.0)


async def test_load_and_metrics_tell_what_was_done(rigs: Callable[..., Rig]) -> None:
    rig = rigs(ScriptedEngine(seats=2))
    caller = await rig.open()
    for handle in (1, 2, 3):
        await caller.start(handle, max_tokens=4)
    await rig.step(2)
    load = rig.loop.load
    assert (load.running, load.waiting, load.kv_usage) == (2, 1, 1.0)
    assert (load.steps, load.generated_tokens, seconds_of(load.step_time)) == (2, 4, 10.0)
    await rig.call(rig.loop.flush)
    assert rig.value("paceline_generation_tokens_total") == 4
    assert rig.value("paceline_generation_running_samples") == 2
    assert rig.value("paceline_generation_waiting_samples") == 1
    await rig.step(6)
    await rig.call(rig.loop.flush)
    assert rig.value("paceline_generation_tokens_total") == 12
    assert rig.value("paceline_generation_step_seconds_count") == 8
    assert rig.value("paceline_generation_running_samples") == 0


class Wrong(TokenDrafter):
    """A drafter whose every offer is wrong, or that raises."""

    name = "wrong"

    def __init__(self, raises: bool) -> None:
        self._raises = raises

    def begin(self, context: Any) -> None:
        self._fail()

    def propose(self, samples: Any, window: int, others: Any) -> Any:
        self._fail()
        return [None] * (len(samples) + 1)

    def learn(self, sample_id: str, drafted: int, accepted: int) -> None:
        self._fail()

    def end(self, sample_id: str, response: Sequence[int]) -> None:
        self._fail()

    def add_rollouts(self, arrival: Any) -> None:
        self._fail()

    def idle_work(self) -> bool:
        self._fail()
        return False

    def _fail(self) -> None:
        if self._raises:
            raise RuntimeError("drafter")


@pytest.mark.parametrize("raises", [False, True])
async def test_drafts_are_verified_and_accounted_for_beside_a_faulty_drafter(
    rigs: Callable[..., Rig], raises: bool
) -> None:
    rig = rigs()
    rig.drafts.speculation = Speculation(
        [Wrong(raises), ReferenceDrafter()], FixedLengthPlanner(4), 512, rig.metrics
    )
    caller = await rig.open()
    # Right for six tokens, then one wrong, then right again.
    await caller.start(1, max_tokens=12, given=(0, 1, 2, 3, 4, 5, 77, 7, 8, 9, 10, 11))
    await caller.start(2, max_tokens=12)
    await rig.step(20)
    await caller.read()
    assert caller.tokens == {1: list(range(12)), 2: list(range(12))}
    (source,) = caller.finished[1].draft_sources
    assert (source.drafter, source.drafted, source.accepted) == ("reference", 12, 9)
    assert (caller.finished[1].decode_steps, caller.finished[1].verify_steps) == (3, 3)
    assert not caller.finished[2].draft_sources
    assert caller.finished[2].verify_steps == 0
    assert (rig.value("paceline_speculation_drafter_faults_total", drafter="wrong") or 0) > 0
    await rig.call(rig.loop.flush)
    assert rig.value("paceline_speculation_verify_steps_total", drafter="reference") == 3


# -- cached rollouts ------------------------------------------------------------------------------------------


async def test_a_sample_follows_what_was_kept_here_of_its_own_seed(rigs: Callable[..., Rig]) -> None:
    rig = rigs()
    rig.drafts.cache = DraftCache(512, 1 << 20)
    rig.drafts.speculation = Speculation([ReferenceDrafter()], FixedLengthPlanner(4), 512, rig.metrics)
    caller = await rig.open()
    here = Origin("r", "p", slot=2, step=7)
    ahead = rollout(range(6), seed=1, slot=2, step=7, kind=RolloutKind.PREGENERATED)
    await rig.call(lambda: rig.loop.drafts.add_rollouts([ahead], rig.loop.samples))
    await caller.start(1, max_tokens=12, origin=here)
    await caller.start(2, max_tokens=12, origin=here, seed=2)
    await rig.step(12)
    await caller.read()
    assert caller.tokens == {1: list(range(12)), 2: list(range(12))}
    (source,) = caller.finished[1].draft_sources
    assert (source.drafter, source.accepted) == ("pregenerated", 5)
    assert (caller.finished[1].cached_tokens, caller.finished[1].reused_prefix) == (6, 6)
    assert caller.finished[2].cached_tokens == 0
    assert rig.value("paceline_drafts_cache_bytes") == rig.drafts.cache.nbytes > 0


@pytest.mark.parametrize("order", ["fork first", "rollout first", "both before the sample"])
async def test_a_sample_goes_on_along_a_fork_of_what_it_follows(rigs: Callable[..., Rig], order: str) -> None:
    rig, taken = rigs(), list[None]()
    rig.drafts.cache = DraftCache(512, 1 << 20)
    drafter = ReferenceDrafter(lambda: taken.append(None))
    rig.drafts.speculation = Speculation([drafter], FixedLengthPlanner(4), 512, rig.metrics)
    caller = await rig.open()
    here = Origin("r", "p", slot=2, step=7)
    known: dict[str, Any] = {"seed": 1, "slot": 2, "step": 7, "kind": RolloutKind.PREGENERATED}
    # The policy before had another token at position 4, and then another text.
    ahead = rollout([0, 1, 2, 3, 99, 98, 97, 96], **known)
    fork = rollout(range(12), fork=5, **known)
    if order != "both before the sample":
        await caller.start(1, max_tokens=12, origin=here)
    for each in (fork, ahead) if order == "fork first" else (ahead, fork):
        await rig.call(lambda each=each: rig.loop.drafts.add_rollouts([each], rig.loop.samples))
    if order == "both before the sample":
        await caller.start(1, max_tokens=12, origin=here)
    await rig.step(12)
    await caller.read()
    assert caller.tokens == {1: list(range(12))}
    assert len(taken) == 1
    (source,) = caller.finished[1].draft_sources
    assert (source.drafter, source.accepted) == ("pregenerated", source.drafted)
    assert caller.finished[1].decode_steps == 3


async def test_a_longer_rollout_takes_the_place_of_the_one_that_is_followed(rigs: Callable[..., Rig]) -> None:
    rig = rigs()
    rig.drafts.cache = DraftCache(512, 1 << 20)
    caller = await rig.open()
    await caller.start(1, max_tokens=12, origin=Origin("r", "p"))
    for length, counted in ((4, 4), (8, 8), (6, 8)):
        found = rollout(range(length), kind=RolloutKind.PREGENERATED)
        await rig.call(lambda found=found: rig.loop.drafts.add_rollouts([found], rig.loop.samples))
        assert caller.stream.samples[1].cached_tokens == counted
    await rig.step(12)
    await caller.read()
    assert (caller.finished[1].cached_tokens, caller.finished[1].reused_prefix) == (8, 8)


async def test_an_abort_counts_what_agreed_so_far(rigs: Callable[..., Rig]) -> None:
    rig = rigs()
    rig.drafts.cache = DraftCache(512, 1 << 20)
    caller = await rig.open()
    await rig.call(lambda: rig.loop.drafts.add_rollouts([rollout(range(10))], rig.loop.samples))
    await caller.start(1, max_tokens=12, origin=Origin("r", "p"))
    await rig.step(3)
    await caller.abort(1)
    await caller.read()
    assert (caller.finished[1].cached_tokens, caller.finished[1].reused_prefix) == (10, 3)


async def test_a_lenient_sample_counts_only_what_it_took_over(rigs: Callable[..., Rig]) -> None:
    rig = rigs()
    rig.drafts.cache = DraftCache(512, 1 << 20)
    caller = await rig.open()
    await rig.call(lambda: rig.loop.drafts.add_rollouts([rollout(range(10))], rig.loop.samples))
    await caller.start(1, max_tokens=4, origin=Origin("r", "p"), verifier=Verifier.LENIENT)
    await rig.step(4)
    await caller.read()
    assert (caller.finished[1].cached_tokens, caller.finished[1].reused_prefix) == (0, 0)


async def test_an_idle_engine_does_what_drafters_put_off_and_still_takes_commands(
    rigs: Callable[..., Rig],
) -> None:
    rig = rigs()
    slices: list[int] = []
    more, enough = threading.Event(), threading.Event()
    more.set()

    class Busy(ReferenceDrafter):
        def idle_work(self) -> bool:
            slices.append(1)
            if len(slices) == 100:
                enough.set()
            return more.is_set()

    speculation = Speculation([Busy()], FixedLengthPlanner(4), 512, rig.metrics)
    await rig.call(lambda: setattr(rig.loop.drafts, "speculation", speculation))
    # Nobody asks for anything meanwhile.
    assert await asyncio.to_thread(enough.wait, WAIT)
    caller = await rig.open()
    await caller.start(1, max_tokens=3)
    more.clear()
    await rig.step(3)
    assert (await caller.read()).tokens == {1: [0, 1, 2]}
    # With nothing put off it waits for commands: one slice after each.
    before = len(slices)
    for _ in range(5):
        await rig.call(lambda: None)
    assert len(slices) <= before + 6
