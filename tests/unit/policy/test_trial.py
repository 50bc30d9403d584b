"""Steps that are done the other way, so that both are measured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.policy.trial import Trial

MANY = 200


def test_nothing_is_tried_at_first() -> None:
    assert not Trial().due(1.05, drafted=True)
    assert not Trial().due(0.95, drafted=False)


def done(trial: Trial, speedup: float) -> list[bool]:
    """The steps whose drafts promise this, by whether they were tried."""
    tried = []
    for _ in range(MANY):
        on = speedup > 1
        other = trial.due(speedup, drafted=on)
        trial.stepped(drafted=on != other)
        tried.append(other)
    return tried


@given(st.floats(0.91, 1.09))
def test_where_the_two_are_close_the_slower_one_is_tried_now_and_then(speedup: float) -> None:
    tried = done(Trial(), speedup)
    assert MANY / 50 <= sum(tried) <= MANY / 30
    # What it costs by the model's own account.
    assert sum(tried) * abs(speedup - 1) <= 0.004 * MANY


@pytest.mark.parametrize("speedup", [0.5, 0.85, 1.2, 9.0])
def test_what_is_much_slower_is_never_tried(speedup: float) -> None:
    assert not any(done(Trial(), speedup))


def test_steps_that_are_mixed_anyway_need_no_trial() -> None:
    trial = Trial()
    for step in range(MANY):
        on = step % 20 == 0
        assert not trial.due(1.0, drafted=on)
        trial.stepped(drafted=on)
