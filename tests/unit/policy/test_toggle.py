"""The toggle, which never speculates against the model's own account."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.generation.speculation.modes.decision import speedup
from services.generation.speculation.modes.toggle import Latch


@given(st.lists(st.tuples(st.integers(1, 64), st.floats(0, 3)), max_size=30), st.floats(0, 1))
def test_without_the_latch_every_step_asks_for_the_margin(steps: list[tuple[int, float]], tau: float) -> None:
    latch = Latch(tau)
    for requests, predicted in steps:
        assert latch.passes(requests, predicted) == (predicted > 1 and predicted >= 1 + tau)


@given(st.lists(st.tuples(st.integers(1, 64), st.floats(0, 3)), max_size=30), st.floats(0, 1))
def test_the_latch_only_ever_adds_steps_that_pay(steps: list[tuple[int, float]], tau: float) -> None:
    plain, latched = Latch(tau), Latch(tau, on=True)
    for requests, predicted in steps:
        with_latch = latched.passes(requests, predicted)
        assert with_latch >= plain.passes(requests, predicted)
        assert not with_latch or predicted > 1


def test_the_latch_holds_while_the_batch_shrinks() -> None:
    latch = Latch(0.1, on=True)
    assert not latch.passes(64, 1.05)
    assert latch.passes(32, 1.2)
    assert latch.passes(16, 1.05), "latched: the margin is not asked for again"
    assert not latch.passes(33, 1.05), "the batch has grown: a new step"
    assert latch.passes(8, 1.2)
    assert not latch.passes(8, 0.99), "it never overrules the model"
    assert not latch.passes(8, 1.05), "and is over then"


def test_speedup_is_the_paper_s() -> None:
    # Four tokens instead of one, in a step of 1.5 plain ones and drafts of half of one.
    assert speedup(2, 6.0, 0.010, 0.020) == pytest.approx(4 / 2)
    assert speedup(0, 0.0, 0.01, 0.01) == 1.0
    assert speedup(3, 1.0, 0.0, 0.0) == 1.0, "what takes no time is nothing to judge by"


@given(st.integers(1, 64), st.floats(0, 100), st.floats(1e-6, 1), st.floats(1e-6, 1), st.floats(0, 10))
def test_speedup_grows_with_acceptance_and_falls_with_time(
    requests: int, expected: float, plain: float, drafted: float, more: float
) -> None:
    base = speedup(requests, expected, plain, drafted)
    assert speedup(requests, expected + more, plain, drafted) >= base
    assert speedup(requests, expected, plain, drafted + more) <= base
