"""The sweep of a live engine, on one whose steps take what a model says."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from services.generation.engine.types import Finish, SampleStep
from services.platform.sampling import ModelLimits
from services.policy.calibration import calibrate
from services.policy.probe import EngineStalled, Grid, sweep
from services.policy.step_time import StepTime
from tests.unit.generation.scripted import Clock, ScriptedEngine
from tests.unit.policy.test_calibration import BANDWIDTH, THROUGHPUT, TRUTH
from tests.unit.policy.test_step_time import ARCHITECTURE

MANY = 1 << 40
GRID = Grid(batches=(1, 4, 16), lengths=(64, 512), drafts=(0, 1, 4), seconds=0.2)


@dataclass(slots=True)
class TimedEngine(ScriptedEngine):
    """Steps take what a model says. Samples end after `ends` tokens, if that is not 0."""

    model: StepTime = TRUTH
    ends: int = 0
    steps: int = field(default=0)

    def step(self) -> list[SampleStep]:
        states = self.decoding()
        rows = len(states) + sum(map(len, self.drafts.values()))
        context = sum(len(state.prompt) + len(state.response) for state in states)
        # What it takes to read the prompts does not matter.
        self.step_time = float(self.model.seconds(len(states), rows, context))
        self.permits += 1
        self.steps += 1
        return ScriptedEngine.step(self)

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    def _finish(self, request: Any, response: list[int], tokens: list[int]) -> Finish | None:
        return Finish.LENGTH if self.ends and len(response) + len(tokens) >= self.ends else None


def engine(**fields: Any) -> TimedEngine:
    return TimedEngine(limits=ModelLimits(512, 4096), **fields)


def test_a_sweep_measures_every_cell_and_its_fit_is_the_engine() -> None:
    clock, told = Clock(), []
    found = sweep(engine(clock=clock), GRID, lambda done, of: told.append((done, of)), clock)
    assert {(p.requests, p.rows // p.requests - 1) for p in found.points} == {
        (batch, width) for batch in GRID.batches for width in GRID.drafts
    }
    # Of each cell one for each turn: two at least, and as many as there is time for.
    assert 2 * 3 * 2 * 3 <= len(found.points) <= 4 * 3 * 2 * 3
    assert 0 < found.held_out.sum() < len(found.points) / 2
    assert told == [(i + 1, 12) for i in range(12)]
    for point in found.points:
        truth = float(TRUTH.seconds(point.requests, point.rows, point.context))
        assert point.seconds == pytest.approx(truth, rel=1e-2)
    assert calibrate(ARCHITECTURE, THROUGHPUT, BANDWIDTH, found).held_out.p90 < 0.05


def test_all_draft_lengths_are_measured_at_the_same_lengths_of_samples() -> None:
    clock = Clock()
    found = sweep(engine(clock=clock), replace(GRID, seconds=1e9), clock=clock)
    for batch in GRID.batches:
        lengths = {
            width: [
                p.context / batch
                for p in found.points
                if (p.requests, p.rows) == (batch, batch * (1 + width))
            ]
            for width in GRID.drafts
        }
        assert {len(each) for each in lengths.values()} == {2 * 4}
        means = [sum(each) / len(each) for each in lengths.values()]
        # A draft token that is kept now and then makes no more of a difference.
        assert max(means) - min(means) < 8


def test_a_sweep_leaves_nothing_in_the_engine() -> None:
    clock = Clock()
    used = engine(clock=clock)
    sweep(used, GRID, clock=clock)
    assert not used.requests


def test_a_grid_is_cut_to_what_an_engine_can_run() -> None:
    grid = Grid(batches=(1, 8, 64), lengths=(32, 2048), drafts=(0, 16))
    assert grid.within(32, 1024, 1 << 20, MANY).batches == [1, 8]
    assert grid.within(32, 1024, 1 << 20, MANY).lengths == [32]
    # 17 rows a sample: of 64 samples 1088. The longest drafts that there is room for are measured.
    few = grid.within(64, 4096, 1087, MANY)
    assert few.batches == grid.within(64, 4096, 1088, MANY).batches == [1, 8, 64]
    assert [few.drafts_of(each) for each in few.batches] == [[0, 16], [0, 16], [0, 15]]
    assert grid.within(64, 4096, 64, MANY).drafts_of(64) == [0]
    assert grid.within(64, 4096, 1088, MANY).drafts_of(64) == [0, 16]
    assert grid.within(64, 4096, 63, MANY).batches == [1, 8]
    with pytest.raises(ValueError, match="fewer than two"):
        grid.within(1, 512, 1 << 20, MANY)


def test_batches_that_have_no_room_for_their_kv_are_left_out() -> None:
    # Four turns of four steps for each of two draft lengths, two tokens a step, and a draft: 112 and 2128 tokens.
    grid = Grid(batches=(1, 8, 64), lengths=(32, 2048), drafts=(0, 16)).within(64, 4096, 1 << 20, 17024)
    assert grid.places == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]
    assert replace(grid, max_tokens=17023).places == [(0, 0), (0, 1), (1, 0), (2, 0)]
    with pytest.raises(ValueError, match="fewer than two"):
        grid.within(64, 4096, 1 << 20, 111)
    clock = Clock()
    small = replace(GRID, max_tokens=16 * (64 + 100))
    found = sweep(engine(clock=clock), small, clock=clock)
    assert {(p.requests, p.rows // p.requests - 1) for p in found.points} == {
        (batch, width) for batch in GRID.batches for width in GRID.drafts
    }
    assert {p.requests for p in found.points if p.context > 512 * p.requests} == {1, 4}


def test_an_engine_that_ends_samples_of_the_sweep_is_reported() -> None:
    clock = Clock()
    with pytest.raises(EngineStalled):
        sweep(engine(clock=clock, ends=10), GRID, clock=clock)
