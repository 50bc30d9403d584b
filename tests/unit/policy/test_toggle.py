"""The toggle, which never speculates against the model's own account."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.contracts.knobs import Knobs
from services.generation.speculation.modes.decision import Mode, PlanReason
from services.generation.speculation.plan import Drafts
from tests.support.step_times import KnownStepTime


def mode(margin: float, *, latch: bool = False) -> Mode:
    time: Any = KnownStepTime()
    return Mode(time, Knobs(margin=margin, latch=latch))


@given(st.lists(st.tuples(st.integers(1, 64), st.floats(0, 3)), max_size=30), st.floats(0, 1))
def test_without_the_latch_every_step_asks_for_the_margin(steps: list[tuple[int, float]], tau: float) -> None:
    latch = mode(tau)
    for requests, predicted in steps:
        assert latch.pays(requests, predicted) == (predicted > 1 and predicted >= 1 + tau)


@given(st.lists(st.tuples(st.integers(1, 64), st.floats(0, 3)), max_size=30), st.floats(0, 1))
def test_the_latch_only_ever_adds_steps_that_pay(steps: list[tuple[int, float]], tau: float) -> None:
    plain, latched = mode(tau), mode(tau, latch=True)
    for requests, predicted in steps:
        with_latch = latched.pays(requests, predicted)
        assert with_latch >= plain.pays(requests, predicted)
        assert not with_latch or predicted > 1


def test_the_latch_holds_while_the_batch_shrinks() -> None:
    latch = mode(0.1, latch=True)
    assert not latch.pays(64, 1.05)
    assert latch.pays(32, 1.2)
    assert latch.pays(16, 1.05), "latched: the margin is not asked for again"
    assert not latch.pays(33, 1.05), "the batch has grown: a new step"
    assert latch.pays(8, 1.2)
    assert not latch.pays(8, 0.99), "it never overrules the model"
    assert not latch.pays(8, 1.05), "and is over then"


def speedup(requests: int, expected: float, plain: float, drafted: float) -> float:
    """Return the predicted speedup of drafts of which so many tokens are expected to be accepted."""
    weighing = mode(0.0)
    weighing.draft(PlanReason.DRAFTS, requests, Drafts(expected=expected), plain, drafted)
    return weighing.last.speedup


def test_speedup_is_the_paper_s() -> None:
    # Four tokens instead of one, in a step of 1.5 plain ones and drafts of half of one.
    assert speedup(2, 6.0, 0.010, 0.020) == pytest.approx(4 / 2)


@given(st.integers(1, 64), st.floats(0, 100), st.floats(1e-6, 1), st.floats(1e-6, 1), st.floats(0, 10))
def test_speedup_grows_with_acceptance_and_falls_with_time(
    requests: int, expected: float, plain: float, drafted: float, more: float
) -> None:
    base = speedup(requests, expected, plain, drafted)
    assert speedup(requests, expected + more, plain, drafted) >= base
    assert speedup(requests, expected, plain, drafted + more) <= base
