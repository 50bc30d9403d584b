"""Steps that are done the other way, so that both are measured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.generation.speculation.decision import Exploration
from tests.support.step_times import settled

MANY, SAMPLES = 200, 20


def test_nothing_is_tried_at_first() -> None:
    assert not begun().should_explore(SAMPLES, 1.05, drafted=True)
    assert not begun().should_explore(SAMPLES, 0.95, drafted=False)


def test_the_first_drafts_wait_for_a_plain_step() -> None:
    trial = Exploration()
    assert trial.should_explore(SAMPLES, 9.0, drafted=True)
    trial.record_step(SAMPLES, drafted=False)
    assert not trial.should_explore(SAMPLES, 9.0, drafted=True)
    assert trial.should_explore(4 * SAMPLES, 9.0, drafted=True), "in each octave"


@pytest.mark.parametrize("speedup", [0.01, 0.5, 0.99])
def test_drafts_of_which_nothing_was_measured_are_tried_once_whatever_is_predicted(speedup: float) -> None:
    trial, tried = Exploration(), []
    for _ in range(12):
        other = trial.should_explore(SAMPLES, speedup, drafted=False)
        trial.record_step(SAMPLES, drafted=other)
        tried.append(other)
    assert tried == [False] * 8 + [True] + [False] * 3


def test_now_and_then_fewer_tokens_are_tried_more_seldom_later() -> None:
    trial, tried = begun(), []
    for _ in range(MANY):
        tried.append(trial.fewer(SAMPLES, 8) == 4)
        trial.record_step(SAMPLES, drafted=True)
    assert 3 <= sum(tried) <= 6


def begun() -> Exploration:
    """Return an exploration for which plain steps were done already."""
    return settled((5, SAMPLES, 40))


def done(trial: Exploration, speedup: float) -> list[bool]:
    """Return the steps whose drafts promise this, by whether they were tried."""
    tried = []
    for _ in range(MANY):
        on = speedup > 1
        other = trial.should_explore(SAMPLES, speedup, drafted=on)
        trial.record_step(SAMPLES, drafted=on != other)
        tried.append(other)
    return tried


@given(st.floats(0.86, 1.29))
def test_the_slower_one_is_tried_soon_at_first_and_more_seldom_the_slower_it_is(speedup: float) -> None:
    tried = done(begun(), speedup)
    assert any(tried[:30])
    assert sum(tried) <= 6
    # What it costs by the model's own account, after the first trials.
    assert sum(tried[MANY // 4 :]) * abs(speedup - 1) <= 0.006 * MANY


@given(st.floats(0.91, 1.09))
def test_where_the_two_are_close_the_slower_one_is_tried_again_and_again(speedup: float) -> None:
    trial = begun()
    done(trial, speedup)
    assert sum(done(trial, speedup)) >= MANY // 65


@pytest.mark.parametrize("speedup", [0.5, 0.84, 1.31, 9.0])
def test_what_is_much_slower_is_never_tried(speedup: float) -> None:
    assert not any(done(begun(), speedup))


def test_steps_that_are_mixed_anyway_need_no_trial() -> None:
    trial = begun()
    for step in range(MANY):
        on = step % 7 == 0
        assert not trial.should_explore(SAMPLES, 1.0, drafted=on)
        trial.record_step(SAMPLES, drafted=on)


def test_each_octave_of_batch_sizes_has_its_own_trials() -> None:
    trial = begun()
    tried = {5: 0, 40: 0}
    for step in range(2 * MANY):
        # Large batches shrink, and small ones are never without drafts.
        requests = 40 if step % 2 else 5
        on = requests == 5
        other = trial.should_explore(requests, 1.05 if on else 0.95, drafted=on)
        trial.record_step(requests, drafted=on != other)
        tried[requests] += other
    assert min(tried.values()) >= MANY // 65
