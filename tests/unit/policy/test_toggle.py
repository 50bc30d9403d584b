"""The toggle, which never speculates against the model's own account."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.contracts.knobs import Knobs
from services.contracts.modes import PlanReason
from services.generation.experiments.modes import ToggleMode
from services.generation.speculation.decision import Mode
from services.generation.speculation.plan import DraftableBatch, Drafts
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


@given(st.integers(1, 64), st.integers(1, 8), st.floats(0.05, 1.5), st.floats(0.3, 0.99))
def test_a_draft_model_runs_where_its_passes_pay_too(
    samples: int, cap: int, share: float, acceptance: float
) -> None:
    """`share`: of a pass in a plain step."""
    time: Any = KnownStepTime(row=2e-5)
    passing: Any = KnownStepTime(weights=share * 1e-3, row=share * 2e-5)
    toggle = ToggleMode(time, Knobs(mode="toggle", draft_cap=cap, margin=0.0))
    nothing = np.zeros(samples)
    batch = DraftableBatch(np.full(samples, 100), nothing, nothing, 0)
    made = toggle.passes(batch, np.full(16, acceptance), passing)
    plain, verifying = time.predict(samples, (samples, samples * (1 + cap)), 0)
    rate = sum(acceptance**k for k in range(cap + 1)) / (
        verifying + cap * passing.seconds(samples, samples, 0)
    )
    gain = rate * plain
    if gain > 1 + 1e-9:
        assert made.tokens.tolist() == [cap] * samples
        assert made.gain == pytest.approx(gain)
    elif gain < 1 - 1e-9:
        assert not made.tokens.any()
