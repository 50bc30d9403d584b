"""The step-time estimator on machines of known step times, and on anything at all."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.step_time.estimator import StepTimeEstimator
from services.step_time.sweep import MeasuredStep, StepTimePrior, rising
from tests.support.step_times import KnownStepTime

machines = st.builds(
    KnownStepTime,
    weights=st.floats(1e-4, 1e-1),
    row=st.floats(1e-7, 1e-3),
    base=st.floats(0, 1e-2),
    per_request=st.floats(0, 1e-4),
)
steps = st.builds(
    lambda samples, width, context, seconds: (samples, samples * (1 + width), samples * context, seconds),
    st.integers(1, 512),
    st.integers(0, 16),
    st.integers(1, 1 << 16),
    st.floats(1e-5, 10.0),
)
KINDS = (1, 2, 3, 5, 9, 17)


def error(estimator: StepTimeEstimator, truth: KnownStepTime, samples: int, context: int) -> float:
    """Return the largest relative error over draft lengths."""
    rows = samples * np.array(KINDS)
    return float(
        np.abs(estimator.predict(samples, rows, context) / truth.predict(samples, rows, context) - 1).max()
    )


@settings(max_examples=100, deadline=None)
@given(st.lists(steps, max_size=60), st.integers(1, 512), st.integers(0, 1 << 24), st.booleans())
def test_whatever_was_measured_predictions_are_positive_and_never_fall_with_the_rows(
    measured: list[tuple[int, int, int, float]], samples: int, context: int, swept: bool
) -> None:
    estimator = KnownStepTime().estimator() if swept else StepTimeEstimator()
    for each in measured:
        assert np.isfinite(estimator.observe(*each))
    found = estimator.predict(samples, np.arange(samples, 18 * samples), context)
    assert np.isfinite(found).all()
    assert (found > 0).all()
    assert (np.diff(found) >= 0).all()


@settings(max_examples=50, deadline=None)
@given(machines, st.sampled_from([1, 4, 16, 64, 256]))
def test_the_sweep_alone_predicts_short_contexts(truth: KnownStepTime, samples: int) -> None:
    assert error(truth.estimator(), truth, samples, 16 * samples) < 0.25


@settings(max_examples=50, deadline=None)
@given(machines, st.integers(1, 256), st.integers(64, 1 << 14), st.sampled_from(KINDS))
def test_a_shape_that_is_measured_is_predicted_as_measured(
    truth: KnownStepTime, samples: int, length: int, kind: int
) -> None:
    estimator, context = truth.estimator(), samples * length
    seconds = 1.3 * float(truth.seconds(samples, kind * samples, context))
    for _ in range(8):
        estimator.observe(samples, kind * samples, context, seconds)
    # What the sweep measured at a context nearby, and 30 % below, still counts a little.
    assert estimator.seconds(samples, kind * samples, context) == pytest.approx(seconds, rel=0.04)


def test_one_plain_step_tells_what_a_context_costs_all_draft_lengths() -> None:
    truth = KnownStepTime(weights=7e-3, row=2.5e-5)
    samples, context = 64, 64 * 8192
    long: Any = lambda rows: truth.predict(samples, rows, 0) + 2e-8 * context  # noqa: E731
    rows, estimator = samples * np.array(KINDS), truth.estimator()
    estimator.observe(samples, samples, context, float(long(np.array([samples]))[0]))
    assert np.abs(estimator.predict(samples, rows, context) / long(rows) - 1).max() < 0.1


def test_without_a_sweep_the_first_step_sets_the_scale_and_few_more_the_shape() -> None:
    truth, estimator = KnownStepTime(weights=0.05, row=2e-4), StepTimeEstimator()
    assert not estimator.known
    estimator.observe(8, 8, 800, float(truth.seconds(8, 8, 800)))
    assert estimator.known
    assert estimator.seconds(8, 8, 800) == pytest.approx(float(truth.seconds(8, 8, 800)), rel=0.05)
    for kind in KINDS * 3:
        estimator.observe(8, 8 * kind, 800, float(truth.seconds(8, 8 * kind, 800)))
    assert error(estimator, truth, 8, 800) < 0.05


def test_measurements_settle_a_prior_that_is_wrong_and_noise_does_not_move_them() -> None:
    """Whatever the factor: nothing bounds what is learned by what was thought first."""
    random = Random(1)
    for factor in (0.02, 0.5, 3.0, 100.0):
        truth = KnownStepTime(weights=1e-3 * factor, row=1e-5 * factor)
        estimator = KnownStepTime(row=1e-5).estimator()
        for _ in range(40):
            for kind in KINDS:
                noise = random.lognormvariate(0, 0.03)
                estimator.observe(16, 16 * kind, 1600, float(truth.seconds(16, 16 * kind, 1600)) * noise)
        assert error(estimator, truth, 16, 1600) < 0.1


def test_an_outlier_hardly_counts_and_a_change_of_the_machine_does() -> None:
    truth = KnownStepTime()
    estimator = truth.estimator()
    plain = float(truth.seconds(8, 8, 800))
    for _ in range(20):
        estimator.observe(8, 8, 800, plain)
    estimator.observe(8, 8, 800, 20 * plain)
    assert estimator.seconds(8, 8, 800) < 1.2 * plain
    for _ in range(6):
        estimator.observe(8, 8, 800, 2 * plain)
    assert estimator.seconds(8, 8, 800) == pytest.approx(2 * plain, rel=0.1)
    # A clock that has halved has halved for steps that were not measured since.
    assert estimator.seconds(8, 40, 800) > 1.5 * plain


@pytest.mark.parametrize("late", [0, 2])
def test_measurements_may_come_late(late: int) -> None:
    truth, estimator = KnownStepTime(weights=1.4e-3, row=1.2e-5), KnownStepTime(row=1e-5).estimator()
    due = [(8, 8 * kind, 800) for kind in KINDS * 6]
    for i in range(len(due) + late):
        estimator.predict(8, (8, 16), 800)
        if i >= late:
            estimator.observe(*due[i - late], float(truth.seconds(*due[i - late])))
    assert error(estimator, truth, 8, 800) < 0.03


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_times_and_shapes_change_nothing(seconds: float) -> None:
    estimator = KnownStepTime().estimator()
    before = estimator.predict(4, (4, 8), 40)
    assert estimator.observe(4, 8, 40, seconds) == 0.0
    for shape in ((0, 4, 40), (4, 3, 40), (4, 8, -1)):
        estimator.observe(*shape, 1.0)
    assert (estimator.predict(4, (4, 8), 40) == before).all()


@settings(deadline=None)
@given(st.lists(steps, min_size=1, max_size=30))
def test_any_sweep_makes_a_prior_that_rises(measured: list[tuple[int, int, int, float]]) -> None:
    prior = StepTimePrior.of(
        [MeasuredStep(samples=n, rows=r, context=c, seconds=s) for n, r, c, s in measured]
    )
    assert np.isfinite(prior.corners).all()
    assert (np.diff(prior.corners) >= 0).all()
    assert (prior.corners > 0).all()
    assert (np.diff(prior.plains) >= 0).all()
    assert (prior.plains > 0).all()


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=20))
def test_what_should_rise_is_taken_as_near_to_what_was_measured_as_it_can_be(values: list[float]) -> None:
    found = rising(values)
    assert (np.diff(found) >= 0).all()
    # The greatest of the means from any place before that are least up to any place behind.
    means = [[np.mean(values[j : k + 1]) for k in range(j, len(values))] for j in range(len(values))]
    wanted = [max(min(means[j][i - j :]) for j in range(i + 1)) for i in range(len(values))]
    assert found == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize(("width", "bias"), [(1, 0.01), (2, 0.02)])
def test_noise_of_a_sweep_makes_steps_hardly_longer_on_average(width: int, bias: float) -> None:
    """Where steps of many sizes take as long, the longest of their times is not the typical one."""
    random, predicted = Random(0), []
    shapes = [each for each in KnownStepTime().sweep() if each.context <= 64 * each.samples]
    for _ in range(100):
        noisy = [
            each.model_copy(update={"seconds": 1e-3 * random.lognormvariate(0, 0.03)}) for each in shapes
        ]
        estimator = StepTimeEstimator(noisy)
        predicted += [estimator.seconds(n, n * width, 8 * n) for n in (1, 4, 16, 64, 256)]
    assert float(np.mean(predicted)) == pytest.approx(1e-3, rel=bias)
