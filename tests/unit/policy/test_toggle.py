"""The toggle, which never speculates against the model's own account."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.policy.correction import CorrectedStepTime, Correction
from services.policy.step_time import Architecture, StepTime
from services.policy.toggle import Toggle, speedup

ARCHITECTURE = Architecture(weight_bytes=1e9, kv_bytes=1e4, dense_flops=1e9, attention_flops=1e3)

models = st.builds(
    StepTime,
    architecture=st.just(ARCHITECTURE),
    throughput=st.floats(1e10, 1e16),
    bandwidth=st.floats(1e9, 1e13),
    base=st.floats(0, 1e-2),
    per_request=st.floats(0, 1e-3),
    per_row=st.floats(0, 1e-3),
    per_attended_token=st.floats(0, 1e-4),
    verify_per_request=st.floats(0, 1e-3),
)
batches = st.lists(st.tuples(st.integers(1, 512), st.floats(0, 16), st.integers(1, 16)), max_size=20)


@given(models, batches, st.floats(0, 1), st.booleans(), st.floats(1e-4, 1), st.floats(0, 1e-2))
def test_it_never_speculates_where_the_model_says_that_it_is_slower(
    model: StepTime,
    batches: Sequence[tuple[int, float, int]],
    margin: float,
    latch: bool,
    measured: float,
    drafting: float,
) -> None:
    time = CorrectedStepTime(model, Correction())
    time.observe(8, 8, 800, measured)
    toggle = Toggle(margin, latch)
    for requests, accepted, length in batches:
        expected = requests * min(accepted, length)
        plain = float(time.seconds(requests, requests, 100 * requests))
        drafted = float(time.seconds(requests, requests * (1 + length), 100 * requests))
        on = toggle.decide(requests, speedup(requests, expected, plain, drafted, drafting))
        if on:
            assert (requests + expected) / (drafted + drafting) >= requests / plain * (1 - 1e-9)


@given(st.lists(st.tuples(st.integers(1, 64), st.floats(0, 3)), max_size=30), st.floats(0, 1))
def test_without_the_latch_every_step_asks_for_the_margin(steps: list[tuple[int, float]], tau: float) -> None:
    toggle = Toggle(tau)
    for requests, predicted in steps:
        assert toggle.decide(requests, predicted) == (predicted > 1 and predicted >= 1 + tau)
        assert not toggle.latched


@given(st.lists(st.tuples(st.integers(1, 64), st.floats(0, 3)), max_size=30), st.floats(0, 1))
def test_the_latch_only_ever_adds_steps_that_pay(steps: list[tuple[int, float]], tau: float) -> None:
    plain, latched = Toggle(tau), Toggle(tau, latch=True)
    for requests, predicted in steps:
        with_latch = latched.decide(requests, predicted)
        assert with_latch >= plain.decide(requests, predicted)
        assert not with_latch or predicted > 1


def test_the_latch_holds_while_the_batch_shrinks() -> None:
    toggle = Toggle(0.1, latch=True)
    assert not toggle.decide(64, 1.05)
    assert toggle.decide(32, 1.2)
    assert toggle.decide(16, 1.05), "latched: the margin is not asked for again"
    assert not toggle.decide(33, 1.05), "the batch has grown: a new step"
    assert toggle.decide(8, 1.2)
    assert not toggle.decide(8, 0.99), "it never overrules the model"
    assert not toggle.decide(8, 1.05), "and is over then"


def test_speedup_is_the_paper_s() -> None:
    # Four tokens instead of one, in a step of 1.5 plain ones and drafts of half of one.
    assert speedup(2, 6.0, 0.010, 0.015, 0.005) == pytest.approx(4 / 2)
    assert speedup(0, 0.0, 0.01, 0.01) == 1.0
    assert speedup(3, 1.0, 0.0, 0.0) == 1.0, "what takes no time is nothing to judge by"


@given(st.integers(1, 64), st.floats(0, 100), st.floats(1e-6, 1), st.floats(1e-6, 1), st.floats(0, 10))
def test_speedup_grows_with_acceptance_and_falls_with_time(
    requests: int, expected: float, plain: float, drafted: float, more: float
) -> None:
    base = speedup(requests, expected, plain, drafted)
    assert speedup(requests, expected + more, plain, drafted) >= base
    assert speedup(requests, expected, plain, drafted, more) <= base
