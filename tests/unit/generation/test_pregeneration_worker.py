"""An instance's pre-generation over a scripted engine and a scripted coordinator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from paceline.internal.v1 import bubble_pb2 as pb
from paceline.times import timestamp
from services.contracts.rollout import RolloutKind, StoredRollout
from services.generation.config import GenerationConfig
from services.generation.draft_cache.cache import DraftCache
from services.generation.draft_cache.origin import Origin
from services.generation.loop.metrics import EngineMetrics, PregenerationMetrics
from services.generation.loop.sample_drafts import SampleDrafts
from services.generation.loop.work_items import AdmissionTerms
from services.generation.loop.work_stream import WorkStream
from services.generation.pregeneration import pregenerator
from services.generation.pregeneration.pregenerator import CoordinatorGone, Pregenerator
from services.generation.pregeneration.upload_queue import UploadQueue
from services.generation.speculation.plan import FixedLengthPlanner
from services.generation.speculation.speculation import Speculation
from services.platform.redis.connection import Keys
from services.platform.redis.registry import InstanceRecord, Registration
from tests.unit.generation.scripted import RUNNER_UP, ScriptedEngine, sample_request, scripted_loop, settled

WAIT = 60.0
SEATS = 8


class Held:
    """A poll that waits for its answer."""

    def __init__(self, request: pb.PollWorkRequest, epoch: int) -> None:
        self.request = request
        self.reply: asyncio.Future[pb.PollWorkResponse] = asyncio.get_running_loop().create_future()
        self._epoch = epoch

    def answer(self, *items: pb.PregenerationTask, **fields: Any) -> None:
        fields = {"coordinator_epoch": self._epoch, "poll_steps": 5} | fields
        assert not self.reply.done(), "the instance did not wait for the answer"
        self.reply.set_result(pb.PollWorkResponse(tasks=items, **fields))

    def fail(self, error: Exception) -> None:
        self.reply.set_exception(error)

    @property
    def told(self) -> dict[int, tuple[int, str]]:
        """Tokens and state of each lease that the request tells of."""
        return {
            each.lease: (
                each.tokens,
                "finished" if each.finished else "returned" if each.returned else "running",
            )
            for each in self.request.progress
        }


class ScriptedCoordinator:
    """Holds every poll until the test answers it."""

    def __init__(self) -> None:
        self.gone = False
        self.epoch = 1
        self._polls: asyncio.Queue[Held] = asyncio.Queue()

    async def find(self) -> None:
        if self.gone:
            raise CoordinatorGone("none is registered")

    async def poll(self, request: pb.PollWorkRequest, seconds: float) -> pb.PollWorkResponse:
        held = Held(request, self.epoch)
        self._polls.put_nowait(held)
        return await held.reply

    async def leave(self) -> None:
        pass

    async def asked(self, holds: Callable[[Held], Any] = lambda _: True) -> Held:
        """Return the next poll that is so; what comes before it is left without an answer."""
        async with asyncio.timeout(WAIT):
            while not holds(held := await self._polls.get()) or held.reply.done():
                pass
        return held


def ended(held: Held) -> bool:
    """Return True if a poll reports an item that does not run any more."""
    return any(state != "running" for _, state in held.told.values())


class Store:
    """Keeps the longest rollout of each slot."""

    def __init__(self) -> None:
        self.available = True
        self.rollouts: dict[int, StoredRollout] = {}
        self.open = asyncio.Event()
        self.open.set()

    async def put(self, rollouts: Sequence[StoredRollout]) -> int:
        await self.open.wait()
        for each in rollouts:
            self.rollouts[each.slot] = each
        return len(rollouts)


class Rig:
    """A pre-generator at work."""

    def __init__(self, fetcher: Any = None) -> None:
        self.engine = ScriptedEngine(seats=SEATS)
        self.registry = CollectorRegistry()
        self.metrics = PregenerationMetrics(self.registry)
        metrics = self.engine_metrics = EngineMetrics(self.registry)
        self.drafts = SampleDrafts(metrics, DraftCache(512, 1 << 20))
        self.loop = scripted_loop(
            self.engine, self.drafts, metrics, flush_interval=50, max_waiting=64, clock=self.engine.clock
        )
        self.loop.start()
        self.loop.ready.result(WAIT)
        self.closed = ""
        config = GenerationConfig(model="m", instance_id="unit")
        self.coordinator = ScriptedCoordinator()
        self.store = Store()
        self.made = Pregenerator(
            config,
            self.loop,
            self.terms,
            Registration(None, Keys(""), InstanceRecord("generation", "unit", epoch=3)),  # type: ignore[arg-type]
            fetcher,
            self.coordinator,  # type: ignore[arg-type]
            UploadQueue(self.store, self.metrics),  # type: ignore[arg-type]
            self.metrics,
        )
        self.running = asyncio.create_task(self.made.run())
        self.real = WorkStream(asyncio.get_running_loop())

    def terms(self) -> AdmissionTerms:
        return AdmissionTerms(self.loop.policy_version, self.engine.limits, self.closed)

    async def call(self, function: Callable[[], Any]) -> Any:
        return await asyncio.wait_for(asyncio.wrap_future(self.loop.call(function)), WAIT)

    async def step(self, steps: int) -> None:
        await self.call(lambda: self.engine.allow(steps))
        while not await self.call(lambda: settled(self.loop)):
            pass

    async def start_real(self, handle: int = 1, max_tokens: int = 3) -> None:
        def take() -> None:
            request = sample_request(self.loop.next_sample_id(), max_tokens=max_tokens)
            self.loop.start_sample(self.real, handle, request)

        await self.call(lambda: self.loop.open(self.real))
        await self.call(take)

    async def take(self, *items: pb.PregenerationTask, **fields: Any) -> pb.PollWorkRequest:
        """Answer the next poll that has room with items; returns when they have been started."""
        held = await self.coordinator.asked(lambda each: each.request.room)
        before = len(self.loop.samples.background)
        held.answer(*items, **fields)
        await self.until(lambda: len(self.loop.samples.background) == before + len(items))
        return held.request

    async def until(self, holds: Callable[[], Any]) -> None:
        async with asyncio.timeout(WAIT):
            while not holds():
                await self.call(lambda: None)

    def value(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"paceline_generation_{name}", labels) or 0.0


def item(lease: int, length: int = 40, **fields: Any) -> pb.PregenerationTask:
    made = pb.PregenerationTask(
        lease=lease, run_id="run", prompt_id="p", slot=lease, step=4, seed=lease, **fields
    )
    made.prompt_token_ids.extend([5, 6])
    made.sampling.max_tokens = length
    return made


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decide nothing by the time that has passed: on a slow machine a poll could come or end early."""
    for name in ("_SILENT_SECONDS", "_GRACE_SECONDS"):
        monkeypatch.setattr(pregenerator, name, 3600.0)


@pytest.fixture
async def rigs() -> AsyncIterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(**options: Any) -> Rig:
        made.append(Rig(**options))
        return made[-1]

    yield make
    for rig in made:
        rig.running.cancel()
        await asyncio.wait([rig.running], timeout=WAIT)
        rig.loop.stop()
        await asyncio.to_thread(rig.loop.join, WAIT)
        assert not rig.loop.is_alive()


@pytest.fixture
async def rig(rigs: Callable[..., Rig]) -> Rig:
    return rigs()


async def test_an_idle_instance_asks_takes_items_and_reports_their_end(rig: Rig) -> None:
    first = await rig.take(item(1, 12), item(2, 7))
    assert (first.instance_id, first.epoch, first.policy_version) == ("unit", 3, 0)
    assert (first.room, first.serving, first.coordinator_epoch) == (SEATS, False, 0)
    await rig.step(12)
    told: dict[int, tuple[int, str]] = {}
    while [state for _, state in told.values()] != ["finished", "finished"]:
        held = await rig.coordinator.asked()
        told |= held.told
        assert held.request.coordinator_epoch == 1
        held.answer()
    assert told == {1: (12, "finished"), 2: (7, "finished")}
    assert (await rig.coordinator.asked()).told == {}
    await rig.until(lambda: [each.finished for each in rig.store.rollouts.values()] == [True, True])
    assert {slot: each.tokens.tolist() for slot, each in rig.store.rollouts.items()} == {
        1: list(range(12)),
        2: list(range(7)),
    }
    assert all(each.kind is RolloutKind.PREGENERATED for each in rig.store.rollouts.values())
    assert rig.value("pregenerated_samples_total", outcome="finished") == 2


async def test_what_was_generated_is_at_hand_for_real_samples(rig: Rig) -> None:
    await rig.take(item(1, 12))
    await rig.step(12)
    cache = rig.drafts.cache
    assert cache is not None
    await rig.until(lambda: cache.same_seed(Origin("run", "p", 1, 4), 1) is not None)
    found = cache.same_seed(Origin("run", "p", 1, 4), 1)
    assert found is not None
    assert found.tokens.tolist() == list(range(12))


async def test_progress_is_reported_every_so_many_steps(rig: Rig) -> None:
    await rig.take(item(1, 50))
    await rig.step(5)
    held = await rig.coordinator.asked()
    assert held.told == {1: (5, "running")}
    held.answer(poll_steps=20)
    await rig.until(lambda: rig.made._stream.poll_steps == 20)
    await rig.step(5)
    await rig.step(15)
    assert (await rig.coordinator.asked()).told == {1: (25, "running")}


async def test_a_poll_that_is_held_is_given_up_for_a_newer_report(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pregenerator, "_GRACE_SECONDS", 0.0)
    await rig.take(item(1, 50))
    for tokens in (5, 10, 15):
        await rig.step(5)
        assert (await rig.coordinator.asked()).told == {1: (tokens, "running")}
    assert rig.value("bubble_polls_total", outcome="interrupted") == 2


async def test_real_work_gives_everything_back_and_asks_for_nothing(rig: Rig) -> None:
    await rig.take(item(1), item(2))
    await rig.step(3)
    await rig.start_real()
    held = await rig.coordinator.asked()
    assert (held.request.room, held.request.serving) == (0, True)
    assert held.told == {1: (3, "returned"), 2: (3, "returned")}
    held.answer()
    await rig.step(3)
    again = await rig.coordinator.asked()
    assert (again.request.room, again.request.serving, again.told) == (SEATS, False, {})
    await rig.until(
        lambda: {slot: len(each.tokens) for slot, each in rig.store.rollouts.items()} == {1: 3, 2: 3}
    )
    assert rig.value("pregenerated_samples_total", outcome="partial") == 2


async def test_real_work_does_not_wait_for_a_poll_that_is_held(rig: Rig) -> None:
    await rig.take(item(1))
    await rig.step(5)
    await rig.coordinator.asked()
    await rig.start_real()
    assert not len(rig.loop.samples.background), "ended by the command that started the real sample"
    held = await rig.coordinator.asked()
    assert held.told == {1: (5, "returned")}


async def test_items_that_come_too_late_are_given_back(rig: Rig) -> None:
    held = await rig.coordinator.asked()
    await rig.call(lambda: setattr(rig.loop, "policy_version", 5))
    held.answer(item(1))
    held = await rig.coordinator.asked()
    assert held.request.policy_version == 5
    assert held.told == {1: (0, "returned")}
    assert not rig.engine.requests


async def test_items_that_meet_real_work_are_given_back(rig: Rig) -> None:
    held = await rig.coordinator.asked()
    # The answer is on its way when the real sample comes.
    held.answer(item(1))
    await rig.start_real()
    held = await rig.coordinator.asked(ended)
    assert held.told[1][1] == "returned"
    assert len(rig.engine.requests) == 1


async def test_new_weights_are_told_at_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pregenerator, "_GRACE_SECONDS", 0.0)
    assert (await rig.coordinator.asked()).request.policy_version == 0
    await rig.call(lambda: setattr(rig.loop, "policy_version", 5))
    assert (await rig.coordinator.asked()).request.policy_version == 5


async def test_a_closed_instance_asks_for_nothing(rig: Rig) -> None:
    await rig.take(item(1))
    await rig.step(2)
    rig.closed = "it is draining"
    await rig.call(rig.loop.abort_all)
    held = await rig.coordinator.asked()
    assert held.told == {1: (2, "returned")}
    assert held.request.room == 0


async def test_a_halt_stops_at_once_and_its_delay_is_measured(rig: Rig) -> None:
    await rig.take(item(1), item(2))
    await rig.step(5)
    (await rig.coordinator.asked()).answer(item(3), halt=True, halted_at=timestamp(1.0))
    held = await rig.coordinator.asked(lambda each: len(each.told) == 3)
    assert not len(rig.loop.samples.background)
    assert held.told == {1: (5, "returned"), 2: (5, "returned"), 3: (0, "returned")}
    assert rig.value("halt_delay_seconds_count") == 1
    assert rig.value("halt_delay_seconds_sum") > 1e9
    held.answer(halt=True, halted_at=timestamp(1.0))
    await rig.coordinator.asked()
    assert rig.value("halt_delay_seconds_count") == 1, "there was nothing to stop"


async def test_revoked_items_end_and_the_others_go_on(rig: Rig) -> None:
    await rig.take(item(1), item(2))
    await rig.step(5)
    (await rig.coordinator.asked()).answer(revoked=[1, 77])
    await rig.until(lambda: len(rig.loop.samples.background) == 1)
    await rig.step(5)
    assert (await rig.coordinator.asked()).told == {2: (10, "running")}


async def test_another_coordinator_is_told_of_what_it_gives_only(rig: Rig) -> None:
    await rig.take(item(1), item(2))
    await rig.step(5)
    rig.coordinator.epoch = 9
    held = await rig.coordinator.asked()
    again = item(41)
    again.slot, again.seed = 1, 1
    held.answer(again, item(3), coordinator_epoch=9)
    await rig.until(lambda: len(rig.loop.samples.background) == 3)
    await rig.step(5)
    held = await rig.coordinator.asked()
    assert held.request.coordinator_epoch == 9
    assert held.told == {41: (10, "running"), 3: (5, "running")}
    assert held.request.room == SEATS - 3


async def test_without_a_coordinator_what_runs_goes_on_and_is_stored(rig: Rig) -> None:
    await rig.take(item(1, 20))
    await rig.step(5)
    held = await rig.coordinator.asked()
    rig.coordinator.gone = True
    held.fail(CoordinatorGone("UNAVAILABLE"))
    await rig.step(15)
    await rig.until(lambda: 1 in rig.store.rollouts and rig.store.rollouts[1].finished)
    assert rig.value("bubble_polls_total", outcome="failed") == 1
    rig.coordinator.gone = False
    assert (await rig.coordinator.asked()).told == {1: (20, "finished")}


async def test_the_instance_sleeps_and_wakes_when_it_is_told(rig: Rig) -> None:
    await rig.take(item(1))
    await rig.step(5)
    (await rig.coordinator.asked()).answer(sleep=True)
    await rig.until(lambda: rig.loop.asleep)
    assert not len(rig.loop.samples.background)
    held = await rig.coordinator.asked(lambda each: each.told.get(1) == (5, "returned"))
    held.answer(sleep=True)
    held = await rig.coordinator.asked()
    assert rig.loop.asleep
    held.answer()
    await rig.until(lambda: not rig.loop.asleep)


async def test_nobody_sleeps_on_when_the_coordinator_is_gone(rig: Rig) -> None:
    (await rig.coordinator.asked()).answer(sleep=True)
    await rig.until(lambda: rig.loop.asleep)
    (await rig.coordinator.asked()).fail(CoordinatorGone("UNAVAILABLE"))
    await rig.until(lambda: not rig.loop.asleep)


async def test_real_work_wakes_the_instance_whatever_the_coordinator_says(rig: Rig) -> None:
    (await rig.coordinator.asked()).answer(sleep=True)
    await rig.until(lambda: rig.loop.asleep)
    held = await rig.coordinator.asked()
    held.answer(sleep=True)
    await rig.start_real(max_tokens=3)
    for _ in range(50):
        await rig.call(lambda: None)
    assert not rig.loop.asleep, "not while there is real work"
    await rig.step(3)
    assert not rig.engine.requests


async def test_an_item_goes_on_where_the_same_policy_stopped(rig: Rig) -> None:
    await rig.take(item(1, 20))
    await rig.step(8)
    await rig.start_real(max_tokens=1)
    await rig.step(1)
    again = item(3, 20)
    again.slot, again.seed = 1, 1
    await rig.take(item(2, 20), again)
    assert {each.seed: each.prefix for each in rig.engine.requests.values()} == {2: (), 1: tuple(range(8))}
    await rig.step(20)
    await rig.until(lambda: 1 in rig.store.rollouts and rig.store.rollouts[1].finished)
    assert rig.store.rollouts[1].tokens.tolist() == list(range(20))
    assert rig.store.rollouts[1].logprobs.tolist() == [-float(token) for token in range(20)]


async def test_what_another_policy_generated_is_only_a_draft(rig: Rig) -> None:
    tokens = np.arange(6, dtype=np.uint32)
    older = StoredRollout(
        "run", "p", 1, 9, RolloutKind.PREGENERATED, 4, 1, tokens, np.zeros(6, np.float32), False
    )
    await rig.call(lambda: rig.loop.drafts.add_rollouts([older], rig.loop.samples))
    await rig.take(item(1, 20))
    assert [each.prefix for each in rig.engine.requests.values()] == [()]


async def test_an_item_that_is_complete_already_is_reported_finished(rig: Rig) -> None:
    tokens = np.arange(12, dtype=np.uint32)
    whole = StoredRollout(
        "run", "p", 1, 0, RolloutKind.PREGENERATED, 4, 1, tokens, np.zeros(12, np.float32), True
    )
    await rig.call(lambda: rig.loop.drafts.add_rollouts([whole], rig.loop.samples))
    (await rig.coordinator.asked()).answer(item(1, 12))
    held = await rig.coordinator.asked(lambda each: each.told.get(1) == (12, "finished"))
    assert held.request.room == SEATS


async def test_a_bad_item_is_given_back_and_harms_no_other(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pregenerator, "_GRACE_SECONDS", 0.0)
    bad = item(1)
    bad.prompt_token_ids.append(100_000)
    (await rig.coordinator.asked()).answer(bad, item(2, 3))
    await rig.until(lambda: len(rig.loop.samples.background) == 1)
    await rig.step(3)
    held = await rig.coordinator.asked(lambda each: each.told.get(2) == (3, "finished"))
    assert held.told[1] == (0, "returned")


async def test_stored_waits_for_the_last_tokens_but_not_for_ever(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.take(item(1, 20))
    await rig.step(3)
    rig.store.open.clear()
    await rig.call(rig.loop.end_background)
    monkeypatch.setattr(pregenerator, "_STORE_SECONDS", 0.01)
    await asyncio.wait_for(rig.made.stored(), WAIT)
    assert not rig.store.rollouts
    monkeypatch.setattr(pregenerator, "_STORE_SECONDS", WAIT)
    waiting = asyncio.create_task(rig.made.stored())
    rig.store.open.set()
    await asyncio.wait_for(waiting, WAIT)
    assert rig.store.rollouts[1].tokens.tolist() == [0, 1, 2]


async def test_an_engine_that_breaks_leaves_its_tokens_in_the_store(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pregenerator, "_STORE_SECONDS", WAIT)
    await rig.take(item(1, 50))
    await rig.step(43)
    await rig.call(lambda: rig.loop.fail(RuntimeError("gone")))
    await asyncio.wait_for(rig.running, WAIT)
    assert len(rig.store.rollouts[1].tokens) == 43
    await asyncio.wait_for(rig.made.stored(), WAIT)


async def test_a_defect_ends_pregeneration_and_nothing_else(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pregenerator, "_STORE_SECONDS", 0.01)
    await rig.take(item(1, 50))
    await rig.step(5)
    (await rig.coordinator.asked()).fail(ValueError("a mistake"))
    await asyncio.wait_for(rig.running, WAIT)
    await rig.until(lambda: not rig.loop.samples)
    await rig.start_real(max_tokens=3)
    await rig.step(3)
    assert not rig.engine.requests


async def test_rollouts_of_the_prompts_are_fetched_for_no_step(rigs: Callable[..., Rig]) -> None:
    wanted: list[Origin] = []

    class Fetcher:
        def want(self, origin: Origin) -> None:
            wanted.append(origin)

    rig = rigs(fetcher=Fetcher())
    await rig.take(item(1), item(2))
    await rig.step(5)
    await rig.take(item(3))
    assert [origin.prompt for origin in wanted] == [("run", "p")] * 2
    assert len({origin.step for origin in wanted}) == 2
    assert all(origin.step < 0 for origin in wanted)


async def test_items_start_without_drafts_that_do_not_come(rigs: Callable[..., Rig]) -> None:
    class Fetcher:
        def want(self, origin: Origin) -> asyncio.Future[None]:
            return asyncio.get_running_loop().create_future()

    rig = rigs(fetcher=Fetcher())
    await rig.take(item(1))


# -- forks ------------------------------------------------------------------------------------------------


async def test_near_ties_are_forked_until_real_work_comes(rig: Rig) -> None:
    rig.engine.ties = {3: 0.01, 5: 0.09, 7: 5.0}
    # No report before the sample has ended: a fork that began earlier would already have run.
    await rig.take(item(1, 12), poll_steps=100)
    await rig.step(12)
    await rig.until(lambda: len(rig.loop.samples.background) == 2)
    prefixes = [each.request.prefix for each in rig.loop.samples.background_samples()]
    assert prefixes == [(0, 1, 2, RUNNER_UP + 3), (0, 1, 2, 3, 4, RUNNER_UP + 5)]
    assert rig.value("pregenerated_forks_total") == 2
    await rig.step(2)
    await rig.start_real()
    assert not rig.loop.samples.background
    await rig.until(lambda: rig.store.rollouts[1].fork == 6)
    assert rig.store.rollouts[1].tokens.tolist() == [0, 1, 2, 3, 4, RUNNER_UP + 5, 6, 7]
    assert (rig.value("pregenerated_tokens_total"), rig.value("forked_tokens_total")) == (12, 4)
    # A fork is not counted as a sample, and nobody is told of it.
    assert rig.value("pregenerated_samples_total", outcome="partial") == 0
    held = await rig.coordinator.asked(ended)
    assert held.told == {1: (12, "finished")}


async def test_a_fault_in_forking_leaves_the_tasks_alone(rig: Rig) -> None:
    class Faulty(FixedLengthPlanner):
        def plain_seconds(self, samples: int, context: int) -> float:
            asked.append(samples)
            raise RuntimeError("planner")

    asked = list[int]()
    rig.engine.ties = {1: 0.01}
    rig.drafts.speculation = Speculation([], Faulty(4), 512, rig.engine_metrics)
    await rig.take(item(1, 12), poll_steps=3)
    await rig.step(3)
    await rig.until(lambda: asked)
    await rig.step(9)
    while (held := await rig.coordinator.asked()).told.get(1) != (12, "finished"):
        held.answer()
