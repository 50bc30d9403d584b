"""The online correction: bounded whatever it is told, right after a while, and hard to fool."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.policy.correction import CorrectedStepTime, Correction
from services.policy.step_time import StepTime
from tests.unit.policy.test_step_time import ARCHITECTURE, models

times = st.floats(1e-5, 10)
observations = st.lists(st.tuples(times, times), max_size=60)
shares = st.floats(0, 0.9)
verifications = st.lists(st.tuples(times, times, shares), max_size=60)
LIMIT = 4.0


def told(observed: list[tuple[float, float]]) -> Correction:
    correction = Correction(LIMIT)
    for predicted, measured in observed:
        correction.observe(predicted, measured)
    return correction


def told_of_verification(observed: list[tuple[float, float, float]]) -> Correction:
    correction = Correction(LIMIT)
    for predicted, measured, share in observed:
        correction.observe(predicted, measured, share * predicted)
    return correction


def test_at_first_nothing_is_corrected() -> None:
    assert Correction().apply([0.0, 1e-3, 2.0]).tolist() == [0.0, 1e-3, 2.0]


@pytest.mark.parametrize("limit", [1.0, 0.0, -2.0, float("nan"), float("inf")])
def test_a_limit_is_a_factor_above_one(limit: float) -> None:
    with pytest.raises(ValueError, match="factor"):
        Correction(limit)


@given(observations, times)
def test_a_corrected_time_stays_within_the_limit(observed: list[tuple[float, float]], time: float) -> None:
    corrected = float(told(observed).apply(time))
    assert time / LIMIT * (1 - 1e-9) <= corrected <= time * LIMIT * (1 + 1e-9)


@given(observations, times)
def test_one_time_is_corrected_as_many_are(observed: list[tuple[float, float]], time: float) -> None:
    correction = told(observed)
    assert correction.applied(time) == pytest.approx(float(correction.apply(time)), rel=1e-12)
    assert correction.applied(0.0) == float(correction.apply(0.0)) == 0.0


@given(observations, times, times)
def test_a_longer_step_is_never_predicted_shorter(
    observed: list[tuple[float, float]], one: float, other: float
) -> None:
    short, long = told(observed).apply(sorted((one, other)))
    assert short <= long * (1 + 1e-12)


@given(verifications, times, shares)
def test_verification_stays_within_the_limit_too(
    observed: list[tuple[float, float, float]], time: float, share: float
) -> None:
    correction = told_of_verification(observed)
    corrected = float(correction.apply(time, share * time))
    assert time / LIMIT * (1 - 1e-9) <= corrected <= time * LIMIT * (1 + 1e-9)
    assert correction.applied(time, share * time) == pytest.approx(corrected, rel=1e-12)


@given(verifications, times, times, times)
def test_more_verification_is_never_predicted_shorter(
    observed: list[tuple[float, float, float]], plain: float, one: float, other: float
) -> None:
    extra = np.sort([one, other])
    short, long = told_of_verification(observed).apply(plain + extra, extra)
    assert short <= long * (1 + 1e-12)


@given(st.floats(0.5, 2.5), st.floats(0.4, 3.0), st.integers(0, 1 << 30))
def test_verification_is_corrected_apart_from_plain_decoding(gain: float, verify: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    correction = Correction(LIMIT)
    for plain, extra in random.uniform(4e-3, 20e-3, (300, 2)):
        for each in (0.0, extra):
            correction.observe(plain + each, gain * plain + verify * each, each)
    plain, extra = np.array([5e-3, 12e-3, 18e-3]), np.array([0.0, 6e-3, 18e-3])
    assert correction.apply(plain + extra, extra) == pytest.approx(gain * plain + verify * extra, rel=0.05)


def test_one_plain_step_tells_what_of_a_time_is_verification() -> None:
    plain, verification, price = 10e-3, 6e-3, 1.6
    correction = Correction(LIMIT)
    for _ in range(12):
        correction.observe(plain + verification, plain + price * verification, verification)
    assert correction.applied(plain) > 1.1 * plain
    correction.observe(plain, plain)
    assert correction.applied(plain) == pytest.approx(plain, rel=0.06)
    whole = correction.applied(plain + verification, verification)
    assert whole == pytest.approx(plain + price * verification, rel=0.05)


@given(observations)
def test_a_step_that_is_none_takes_no_time(observed: list[tuple[float, float]]) -> None:
    assert told(observed).apply(0.0) == 0


@given(observations, st.sampled_from([0.0, -1.0, float("nan"), float("inf")]), times)
def test_senseless_times_change_nothing(observed: list[tuple[float, float]], bad: float, time: float) -> None:
    correction = told(observed)
    before = float(correction.apply(time))
    correction.observe(bad, time)
    correction.observe(time, bad)
    assert float(correction.apply(time)) == before


@given(st.floats(0.5, 2.5), st.floats(0, 2e-3), st.integers(0, 1 << 30))
def test_an_affine_error_is_learned(gain: float, offset: float, seed: int) -> None:
    predicted = np.random.default_rng(seed).uniform(4e-3, 20e-3, 300)
    correction = told([(each, gain * each + offset) for each in predicted])
    asked = np.array([5e-3, 10e-3, 18e-3])
    assert correction.apply(asked) == pytest.approx(gain * asked + offset, rel=0.05)


def test_one_step_that_was_disturbed_hardly_changes_a_prediction() -> None:
    steady = [(5e-3, 6e-3), (8e-3, 9e-3)] * 60
    before, after = told(steady).apply(6e-3), told([*steady, (6e-3, 70e-3)]).apply(6e-3)
    assert after == pytest.approx(float(before), rel=0.05)


def test_a_machine_that_became_slower_is_followed_within_a_few_steps() -> None:
    correction = told([(5e-3, 5e-3), (8e-3, 8e-3)] * 60)
    for _ in range(4):
        correction.observe(5e-3, 15e-3)
        correction.observe(8e-3, 24e-3)
    assert correction.apply(6e-3) == pytest.approx(18e-3, rel=0.1)


def test_a_guess_far_off_is_put_right_within_a_few_steps() -> None:
    correction = Correction(64)
    for _ in range(4):
        correction.observe(1e-3, 30e-3)
        correction.observe(2e-3, 60e-3)
    assert correction.apply(1.5e-3) == pytest.approx(45e-3, rel=0.1)


def test_the_same_step_for_ever_does_not_unsettle_it() -> None:
    correction = told([(5e-3, 6e-3)] * 5000)
    # Doubt in what is never seen must not turn one surprise into nonsense.
    correction.observe(5e-3, 6.5e-3)
    assert correction.apply(5e-3) == pytest.approx(6e-3, rel=0.1)
    assert 5e-3 <= float(correction.apply(10e-3)) <= 20e-3


def test_a_model_and_its_correction_work_together() -> None:
    model = StepTime(architecture=ARCHITECTURE, throughput=1e14, bandwidth=1e12, base=1e-3)
    corrected = CorrectedStepTime(model, Correction())
    raw = float(model.seconds(4, 12, 2000))
    assert corrected.observe(4, 12, 2000, 1.3 * raw) == raw
    for rows in (4, 12, 400, 1000) * 30:
        corrected.observe(4, rows, 2000, 1.3 * float(model.seconds(4, rows, 2000)))
    assert corrected.seconds(4, 12, 2000) == pytest.approx(1.3 * raw, rel=0.02)


def test_batches_of_other_sizes_are_corrected_by_themselves() -> None:
    model = StepTime(architecture=ARCHITECTURE, throughput=1e14, bandwidth=1e12, base=1e-3, per_request=1e-4)
    corrected = CorrectedStepTime(model, Correction())

    def seen(requests: int, factor: float, times: int) -> None:
        for rows in (requests, 3 * requests) * times:
            raw = float(model.seconds(requests, rows, 50 * requests))
            corrected.observe(requests, rows, 50 * requests, factor * raw)

    def factor(requests: int) -> float:
        asked = requests, 2 * requests, 50 * requests
        return float(corrected.seconds(*asked) / model.seconds(*asked))

    seen(100, 1.5, 60)
    # Nothing is known of others yet: they are as the nearest.
    assert factor(100) == pytest.approx(1.5, rel=0.05)
    assert factor(3) == pytest.approx(1.5, rel=0.05)
    seen(3, 0.8, 60)
    assert [factor(2), factor(3), factor(100)] == pytest.approx([0.8, 0.8, 1.5], rel=0.05)
    # Between them as the nearer one.
    assert [factor(5), factor(40)] == pytest.approx([0.8, 1.5], rel=0.05)
    together = corrected.seconds([3, 100], [6, 200], [150, 5000])
    assert together.tolist() == [float(corrected.seconds(n, 2 * n, 50 * n)) for n in (3, 100)]


@settings(deadline=None)
@given(
    models,
    st.integers(1, 256),
    st.integers(0, 4096),
    st.integers(0, 10**6),
    st.lists(st.tuples(st.integers(0, 64), st.floats(1e-4, 1.0)), max_size=20),
)
def test_a_curve_is_the_corrected_time_by_draft_tokens(
    model: StepTime, requests: int, drafted: int, context: int, measured: list[tuple[int, float]]
) -> None:
    corrected = CorrectedStepTime(model, Correction())
    for each, seconds in measured:
        corrected.observe(requests, requests + each, context, seconds)
    found = corrected.curve(requests, context).seconds(drafted)
    assert found == pytest.approx(float(corrected.seconds(requests, requests + drafted, context)))
