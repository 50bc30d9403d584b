"""The planner in the engine loop: the same tokens as without it, and which steps teach it how long steps take."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from paceline.times import seconds_of
from services.contracts.knobs import Knobs
from services.generation.build import build_drafts
from services.generation.config import GenerationConfig
from services.generation.drafters.reference.drafter import ReferenceDrafter
from services.generation.engine.draft_forms import FORMS, DraftForm
from services.generation.engine.types import EngineSampleState
from services.generation.experiments.trees.planning import TreeProposals
from services.generation.loop.metrics import EngineMetrics
from services.generation.loop.sample_drafts import SampleDrafts
from services.generation.loop.work_stream import WorkStream
from services.generation.speculation.drafter import DraftContext
from services.generation.speculation.plan import FixedLengthPlanner
from services.generation.speculation.planner import KnobDrivenPlanner
from services.generation.speculation.speculation import DraftPlanner, Speculation
from services.step_time.sweep import SavedSweep, SweepSubject, UnusableSweep
from tests.support.models import tiny_model
from tests.support.step_times import KnownStepTime, settled
from tests.unit.generation.scripted import ScriptedEngine, sample_request, scripted_loop
from tests.unit.generation.test_loop import Rig

# Right for six tokens, then one wrong, then right again.
GIVEN = (0, 1, 2, 3, 4, 5, 77, 7, 8, 9, 10, 11)


@dataclass(slots=True)
class NamedEngine(ScriptedEngine):
    """One that says what its weights and its device are."""

    dtype: str = "float32"
    hardware: str = "scripted device"
    max_running: int = 4
    kv_capacity: int = 1 << 20
    model_drafts: dict[str, Any] = field(default_factory=dict)
    form: DraftForm | None = None


@pytest.fixture
def rigs() -> Iterator[Callable[..., Rig]]:
    """Make loops and end them with the test."""
    made: list[Rig] = []

    def make(plan: DraftPlanner | None = None, **fields: Any) -> Rig:
        rig = Rig(NamedEngine(**fields))
        if plan is not None:
            rig.drafts.speculation = Speculation([ReferenceDrafter()], plan, 512, rig.metrics)
        made.append(rig)
        return rig

    yield make
    for rig in made:
        rig.loop.stop()
        rig.loop.join(20)


def planner(rig: Rig) -> KnobDrivenPlanner:
    """Return a planner at work in a loop, that counts where the loop does."""
    knobs = Knobs(mode="planner", draft_cap=4, margin=0.0)
    plan = KnobDrivenPlanner(
        knobs, KnownStepTime().estimator(), lambda _: None, metrics=rig.metrics.planner, exploration=settled()
    )
    rig.drafts.speculation = Speculation([ReferenceDrafter()], plan, 512, rig.metrics)
    return plan


async def _tokens(rig: Rig) -> dict[int, list[int]]:
    caller = await rig.open()
    await caller.start(1, max_tokens=12, given=GIVEN)
    await caller.start(2, max_tokens=9)
    await caller.start(3, max_tokens=5, given=(9, 9, 9, 9))
    await rig.step(20)
    await caller.read()
    assert set(caller.finished) == {1, 2, 3}
    return caller.tokens


async def test_tokens_are_the_same_off_fixed_and_planned(rigs: Callable[..., Rig]) -> None:
    planned = rigs()
    planner(planned)
    off = await _tokens(rigs())
    assert off == {1: list(range(12)), 2: list(range(9)), 3: list(range(5))}
    assert await _tokens(rigs(FixedLengthPlanner(4))) == off
    assert await _tokens(planned) == off
    assert (planned.value("paceline_planner_tokens_total") or 0) > 0


async def test_an_engine_that_schedules_ahead_gives_the_same_tokens(rigs: Callable[..., Rig]) -> None:
    """Outcomes come a step late, and what is asked for between two steps finds nothing in flight."""
    rig = rigs(ahead=True, step_time=2e-3)
    planner(rig)
    assert await _tokens(rig) == {1: list(range(12)), 2: list(range(9)), 3: list(range(5))}
    assert rig.engine.in_flight == 0
    assert (rig.value("paceline_planner_tokens_total") or 0) > 0
    # Those of which the end was seen by a step.
    assert (rig.value("paceline_planner_step_time_error_ratio_count") or 0) > 0


async def test_a_step_that_was_settled_is_one_step_with_its_time(rigs: Callable[..., Rig]) -> None:
    """Each command settles the step in flight, so that the next one is only launched."""
    rig = rigs(ahead=True, step_time=2e-3)
    caller = await rig.open()
    await caller.start(1, max_tokens=5)
    for _ in range(5):
        await rig.step(1)
    await caller.read()
    assert (rig.loop.load.steps, rig.loop.load.generated_tokens) == (5, 5)
    assert rig.value("paceline_generation_step_seconds_count") == 5
    assert rig.value("paceline_generation_step_seconds_sum") == pytest.approx(5 * 2e-3)
    spent = caller.finished[1]
    assert seconds_of(spent.prefill_time) == pytest.approx(2e-3)
    assert seconds_of(spent.plain_time) == pytest.approx(4 * 2e-3)


class LateCommands(queue.SimpleQueue[Callable[[], None]]):
    """Commands, of which one comes just after the loop has seen that there is none."""

    late: Callable[[], object] | None = None

    def empty(self) -> bool:
        found = super().empty()
        if found and self.late is not None:
            late, self.late = self.late, None
            late()
        return found


async def test_a_command_never_runs_while_a_step_is_in_flight() -> None:
    engine, metrics = NamedEngine(ahead=True, permits=40), EngineMetrics(CollectorRegistry())
    loop = scripted_loop(engine, SampleDrafts(metrics), metrics, flush_interval=50.0, max_waiting=9)
    loop._commands = commands = LateCommands()
    seen = list[Future[int]]()
    commands.late = lambda: seen.append(loop.call(lambda: engine.in_flight))
    stream = WorkStream(asyncio.get_running_loop())
    begun = loop.call(lambda: loop.start_sample(stream, 1, sample_request("a", max_tokens=20)))
    loop.start()
    begun.result(20)
    while not seen:
        await asyncio.to_thread(loop.call(lambda: None).result, 20)
    assert seen[0].result(20) == 0
    loop.stop()
    loop.join(20)


async def test_every_step_that_only_decodes_is_measured(rigs: Callable[..., Rig]) -> None:
    rig = rigs(step_time=2e-3)
    plan = planner(rig)
    caller = await rig.open()
    await caller.start(1, max_tokens=30)
    await rig.step(8)
    assert rig.value("paceline_planner_step_time_error_ratio_count") == 8
    assert rig.value("paceline_planner_measured_step_seconds_total") == pytest.approx(8 * 2e-3)
    # 1 ms was predicted at first.
    assert float(plan.step_time.seconds(1, 1, 9)) == pytest.approx(2e-3, rel=0.1)


async def test_steps_in_which_samples_wait_for_a_place_are_not(rigs: Callable[..., Rig]) -> None:
    rig = rigs(seats=1)
    planner(rig)
    caller = await rig.open()
    await caller.start(1, max_tokens=30)
    await caller.start(2, max_tokens=30)
    await rig.step(8)
    assert rig.value("paceline_planner_step_time_error_ratio_count") == 0


def _build_drafts(rig: Rig, model: Path, **fields: Any) -> None:
    rig.loop.ready.result(20)
    config = GenerationConfig(
        model=str(model),
        instance_id="unit",
        speculation="planner",
        **{"sweep_seconds": 0, "drafters": ("reference",), **fields},
    )
    metrics = EngineMetrics(CollectorRegistry())
    rig.drafts.speculation = build_drafts(config, rig.engine, metrics, rig.loop.samples.origin_of).speculation


async def test_an_instance_plans_when_it_is_told_to(rigs: Callable[..., Rig], tmp_path: Path) -> None:
    rig = rigs()
    _build_drafts(rig, tiny_model(tmp_path, num_hidden_layers=1), draft_window=5, draft_margin=0.1)
    assert rig.drafts.speculation is not None
    plan = rig.drafts.speculation.plan
    assert isinstance(plan, KnobDrivenPlanner)
    assert (plan.knobs.shared.mode, plan.knobs.shared.draft_cap, plan.knobs.shared.margin) == (
        "planner",
        5,
        0.1,
    )
    assert (await _tokens(rig))[1] == list(range(12))


async def test_an_instance_does_not_start_with_a_sweep_that_cannot_be_read(
    rigs: Callable[..., Rig], tmp_path: Path
) -> None:
    model = tiny_model(tmp_path, num_hidden_layers=1)
    with pytest.raises(UnusableSweep):
        _build_drafts(rigs(), model, calibration=tmp_path / "config.json")


async def test_an_instance_takes_the_saved_sweep_of_its_own_kind_only(
    rigs: Callable[..., Rig], tmp_path: Path
) -> None:
    model = tiny_model(tmp_path / "model", num_hidden_layers=1)
    for device, known in (("another device", False), ("scripted device", True)):
        subject = SweepSubject.of(model, device, 1, "float32")
        SavedSweep(subject=subject, steps=tuple(KnownStepTime().sweep())).save(tmp_path / "saved")
        rig = rigs()
        _build_drafts(rig, model, calibration=tmp_path / "saved", sweep_seconds=0)
        assert rig.drafts.speculation is not None
        plan = rig.drafts.speculation.plan
        assert isinstance(plan, KnobDrivenPlanner)
        assert plan.step_time.known is known


async def test_an_instance_plans_by_the_sweep_of_another_device_that_it_is_to_assume(
    rigs: Callable[..., Rig], tmp_path: Path
) -> None:
    model, rig = tiny_model(tmp_path / "model", num_hidden_layers=1), rigs()
    subject = SweepSubject.of(model, "another device", 8, "bfloat16")
    path = SavedSweep(subject=subject, steps=tuple(KnownStepTime().sweep())).save(tmp_path / "saved")
    _build_drafts(rig, model, assumed_step_times=path)
    assert rig.drafts.speculation is not None
    plan = rig.drafts.speculation.plan
    assert isinstance(plan, KnobDrivenPlanner)
    before = plan.step_time.seconds(2, 4, 40)
    await _tokens(rig)
    assert plan.step_time.seconds(2, 4, 40) == before
    with pytest.raises(UnusableSweep):
        _build_drafts(rigs(), model, assumed_step_times=tmp_path / "missing.json")


async def test_a_mixture_of_experts_is_planned_like_any_model(
    rigs: Callable[..., Rig], tmp_path: Path
) -> None:
    rig = rigs()
    _build_drafts(rig, tiny_model(tmp_path, num_hidden_layers=1, num_experts=8), draft_window=5)
    assert rig.drafts.speculation is not None
    assert isinstance(rig.drafts.speculation.plan, KnobDrivenPlanner)
    assert (await _tokens(rig))[1] == list(range(12))


@pytest.mark.parametrize("trees", [True, False])
def test_branches_are_proposed_where_the_engine_verifies_them(
    rigs: Callable[..., Rig], tmp_path: Path, trees: bool
) -> None:
    rig = rigs(form=FORMS[0] if trees else None)
    _build_drafts(rig, tiny_model(tmp_path, num_hidden_layers=1), drafters=("suffix",), max_branches=2)
    assert rig.drafts.speculation is not None
    (drafter,) = rig.drafts.speculation.drafters
    drafter.begin(DraftContext("s", [1, 2]))
    made = drafter.propose([EngineSampleState("s", [1, 2], [5, 6, 5, 6, 5], 99, 7)], 4, {})
    assert made is not None
    assert isinstance(made, TreeProposals) is trees
