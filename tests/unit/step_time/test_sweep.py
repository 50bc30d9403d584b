"""The sweep of an engine, planned and on one whose steps take what a machine says."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.contracts.sampling import ModelLimits
from services.generation.engine.startup import measure_steps
from services.generation.engine.types import Finish, SampleStep
from services.step_time.estimator import StepTimeEstimator
from services.step_time.sweep import SHORT_CONTEXT, swept_batches
from tests.support.step_times import KnownStepTime
from tests.unit.generation.scripted import Clock, ScriptedEngine


@given(st.integers(1, 2048), st.integers(1, 1 << 16), st.integers(2, 1 << 16))
def test_a_sweep_keeps_to_the_limits_and_begins_with_one_sample_and_the_largest_batch(
    most: int, rows: int, length: int
) -> None:
    batches = swept_batches(most, rows, length)
    assert all(max(each.rows) <= rows and list(each.rows) == sorted(set(each.rows)) for each in batches)
    assert all(each.rows[0] == each.samples <= most for each in batches)
    assert batches[0].samples == 1
    assert any(each.samples == min(most, rows) for each in batches[:2])


@given(
    st.integers(1, 2048),
    st.integers(1, 1 << 16),
    st.lists(st.integers(1, 1024), min_size=1, max_size=40, unique=True).map(sorted),
)
def test_where_there_are_graphs_their_sizes_are_measured_and_the_step_beyond_the_largest(
    most: int, rows: int, graphs: list[int]
) -> None:
    found = [
        (batch.samples, each) for batch in swept_batches(most, rows, 4096, graphs) for each in batch.rows
    ]
    verifying = {each for samples, each in found if each > samples}
    assert {each for each in verifying if each <= graphs[-1]} <= set(graphs)
    largest = min(most, rows)
    if largest <= graphs[-1] < min(rows, 2 * largest):
        assert graphs[-1] + 1 in verifying


@dataclass(slots=True)
class TimedEngine(ScriptedEngine):
    """Steps take what a machine says.

    Samples end after `ends` tokens, if that is not 0, and the engine fails after `fails_after` steps.
    """

    machine: KnownStepTime = field(default_factory=lambda: KnownStepTime(row=1e-5))
    ends: int = 0
    seats: int = 32
    kv_capacity: int = 1 << 30
    forgotten: int = 0
    fails_after: int | None = None
    stalled_after: int | None = None

    def step(self) -> list[SampleStep]:
        if self.fails_after is not None:
            if not self.fails_after:
                raise RuntimeError("out of memory")
            self.fails_after -= 1
        states = self.decoding()
        rows = len(states) + sum(map(len, self.drafts.values()))
        context = sum(len(state.prompt) + len(state.response) for state in states)
        self.step_time = float(self.machine.seconds(max(len(states), 1), max(rows, 1), context))
        if self.stalled_after is not None:
            self.stalled_after -= 1
            self.step_time += 30.0 * (self.stalled_after < 0)
        self.permits += 1
        return ScriptedEngine.step(self)

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    def forget_kv(self) -> None:
        assert not self.requests
        self.forgotten += 1

    def _finish(self, request: Any, response: list[int], tokens: list[int]) -> Finish | None:
        return Finish.LENGTH if self.ends and len(response) + len(tokens) >= self.ends else None


def _engine(**fields: Any) -> Any:
    return TimedEngine(clock=Clock(), limits=ModelLimits(512, 4096), **fields)


def test_a_sweep_measures_what_steps_take_and_leaves_an_empty_engine() -> None:
    engine = _engine()
    found = measure_steps(engine, 100.0, engine.clock)
    assert engine.forgotten == 1
    for step in found:
        assert step.seconds == pytest.approx(
            float(engine.machine.seconds(step.samples, step.rows, step.context))
        )
    assert {step.samples for step in found} == {1, 2, 4, 8, 16, 32}
    assert any(step.context > SHORT_CONTEXT * step.samples for step in found)
    estimator = StepTimeEstimator(found)
    assert estimator.seconds(16, 64, 320) == pytest.approx(
        float(engine.machine.seconds(16, 64, 320)), rel=0.1
    )


def test_samples_share_the_tokens_of_a_graph_that_is_no_multiple_of_them() -> None:
    engine = _engine(graph_sizes=(1, 2, 4, 24, 40, 72, 100))
    found = measure_steps(engine, 100.0, engine.clock)
    assert {step.rows for step in found if step.rows > step.samples} == {2, 4, 24, 40, 72, 100, 101, 128} | {
        samples * width for samples in (32,) for width in (8, 16)
    }


def test_a_slow_engine_is_measured_for_no_longer_than_there_is_time() -> None:
    engine = _engine(machine=KnownStepTime(weights=0.3))
    began = engine.clock()
    found = measure_steps(engine, 2.0, engine.clock)
    # The last shape may begin just before the end.
    assert engine.clock() - began < 6.0
    assert {step.samples for step in found} <= {1, 32}
    assert found


@pytest.mark.parametrize("stalled_after", [0, 3, 9])
def test_an_engine_that_stands_still_is_measured_no_longer(stalled_after: int) -> None:
    """From some step on every step takes half a minute, as if the machine were busy with something else."""
    engine = _engine(stalled_after=stalled_after)
    began = engine.clock()
    measure_steps(engine, 2.0, engine.clock)
    assert engine.forgotten == 1
    assert not engine.requests
    # The step that is under way, and the one that tells the worker of the end.
    assert engine.clock() - began < 8 + 2 * 30 + 1


@pytest.mark.parametrize("ends", [1, 3, 9])
def test_samples_that_end_early_leave_what_was_measured_until_then(ends: int) -> None:
    engine = _engine(ends=ends)
    found = measure_steps(engine, 100.0, engine.clock)
    assert engine.forgotten == 1
    StepTimeEstimator(found)


@pytest.mark.parametrize("permits", [0, 5])
def test_a_sweep_that_fails_leaves_no_sample(permits: int) -> None:
    engine = _engine(fails_after=permits)
    with pytest.raises(RuntimeError, match="out of memory"):
        measure_steps(engine, 100.0, engine.clock)
    assert not engine.requests
