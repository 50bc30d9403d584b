"""The saturation point of throughput, and how measured steps change it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.reallocator.planning.throughput import Architecture, Roofline, StepTime, ThroughputCurve
from tests.unit.reallocator.fleets import FIGURE_5, FLAT, STEEP, curves

LLAMA_8B = Architecture(weight_bytes=16e9, kv_bytes=131072, dense_flops=16e9, attention_flops=524288)


def roofline(most: int = 256, **fields: float) -> Roofline:
    model = StepTime(architecture=LLAMA_8B, throughput=4e13, bandwidth=8e11, **fields)
    return Roofline(model.seconds, most)


def test_the_saturation_point_is_where_the_roof_bends() -> None:
    assert FIGURE_5.saturation_point(0.25) == 11
    assert STEEP.saturation_point(0.25) == 1


def test_a_flat_curve_has_no_saturation_point() -> None:
    assert FLAT.saturation_point(0.25) is None
    assert ThroughputCurve((0.01,)).saturation_point(0.25) is None


def test_a_flatter_demand_comes_earlier() -> None:
    soft = ThroughputCurve(tuple(0.01 + 0.001 * n for n in range(1, 257)))
    points = [soft.saturation_point(flatness) for flatness in (0.5, 0.25, 0.1)]
    assert points == sorted(points)
    # a + b n: elasticity a / (a + b n) is 1/4 at n = 3 a / b.
    assert points[1] == pytest.approx(30 / 1.25, abs=3), "a window of 1.5 looks ahead"


@settings(deadline=None, max_examples=60)
@given(curves(), st.floats(0.05, 0.9))
def test_beyond_the_saturation_point_a_sample_brings_little(curve: ThroughputCurve, flatness: float) -> None:
    point = curve.saturation_point(flatness)
    for n in range(1, len(curve.seconds)):
        ahead = min(max(n + 1, math.ceil(1.5 * n)), len(curve.seconds))
        gain = math.log(curve.throughput(ahead) / curve.throughput(n)) / math.log(ahead / n)
        if point is None or n < point:
            assert gain >= flatness - 1e-9
        else:
            assert gain < flatness + 1e-9


@settings(deadline=None, max_examples=60)
@given(curves(), st.lists(st.floats(0, 1000), max_size=40), st.floats(0, 1000))
def test_more_work_is_done_later(curve: ThroughputCurve, remaining: list[float], more: float) -> None:
    assert curve.finish_seconds([]) == 0.0
    before, after = curve.finish_seconds(remaining), curve.finish_seconds([*remaining, more])
    assert after >= before - 1e-9
    longest = max(remaining, default=0.0) / curve.tokens
    assert before >= longest * curve.step_seconds(1) - 1e-9
    assert before <= longest * curve.step_seconds(len(remaining)) + 1e-9


def test_beyond_the_curve_samples_take_turns() -> None:
    assert STEEP.step_seconds(128) == pytest.approx(2 * STEEP.step_seconds(64))
    assert STEEP.step_seconds(0) == 0.0
    assert STEEP.throughput(0) == 0.0


def test_the_threshold_of_a_model_is_where_computing_takes_as_long_as_reading_the_weights() -> None:
    model = roofline()
    # 16e9 bytes at 8e11 a second are 20 ms; a row at 4e13 is 0.4 ms: they meet at 50.
    assert model.threshold(model.curve()) == pytest.approx(46, abs=2)


def test_a_threshold_that_is_never_reached_is_all_that_fit() -> None:
    model = roofline(most=32)
    assert model.threshold(model.curve()) == 32


def test_measured_steps_move_the_curve() -> None:
    model = roofline()
    before = model.curve()
    for n in (1, 8, 16, 32, 48) * 20:
        model.observe(n, 2 * before.step_seconds(n), 1.0, 1.0)
    after = model.curve()
    assert after.step_seconds(16) == pytest.approx(2 * before.step_seconds(16), rel=0.1)


def test_measured_throughput_moves_the_threshold() -> None:
    model = roofline()
    assert model.threshold(model.curve()) > 40
    for _ in range(100):
        for n in (1, 4, 8, 16, 32, 64):
            # A machine that computes ten times slower than was thought.
            model.observe(n, max(0.02, n * 0.004), 1.0, 1.0)
    assert model.threshold(model.curve()) <= 10


def test_steps_that_were_disturbed_move_no_threshold() -> None:
    quiet, disturbed = roofline(most=64), roofline(most=64)
    for model, factor in ((quiet, 1.0), (disturbed, 1.8)):
        for _ in range(20):
            for n in (1, 2, 4, 8, 16, 32, 64):
                model.observe(n, (0.02 + 0.0005 * n) * (factor if n in (4, 16) else 1.0), 1.0, 1.0)
    curves = [model.curve() for model in (quiet, disturbed)]
    for n in (2, 4, 16, 48):
        assert curves[1].step_seconds(n) == pytest.approx(curves[0].step_seconds(n), rel=0.02)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(1, 64), st.floats(1e-4, 1.0)), max_size=40))
def test_whatever_is_measured_the_curve_stays_a_roofline(seen: list[tuple[int, float]]) -> None:
    model = roofline(most=64)
    for samples, seconds in seen:
        model.observe(samples, seconds, 1.0, 100.0)
    steps = np.array(model.curve().seconds)
    assert (steps > 0).all()
    added = np.diff(steps)
    assert (added >= -1e-12).all()
    assert (np.diff(added) >= -1e-9).all() or not seen


def test_prefilling_a_context_takes_what_computing_it_takes() -> None:
    model = roofline()
    for _ in range(50):
        model.observe(8, model.curve().step_seconds(8), 1.0, 1000.0)
    # 16e9 operations a token at 4e13 a second are 0.4 ms; the weights are read meanwhile.
    found = model.curve().prefill_seconds(1000)
    assert 0.3 < found < 0.5
    assert model.curve().prefill_seconds(2000) == pytest.approx(2 * found)


def test_a_threshold_does_not_follow_every_tremble() -> None:
    model = roofline()
    curve = model.curve()
    first = model.threshold(curve)
    stretched = ThroughputCurve(tuple(s * (1 + 0.003 * n) for n, s in enumerate(curve.seconds)))
    assert stretched.saturation_point(0.25) != first
    assert model.threshold(stretched) == first


def test_acceptance_scales_the_throughput() -> None:
    model = roofline()
    for _ in range(40):
        model.observe(8, model.curve().step_seconds(8), 3.0, 500.0)
    assert model.curve().tokens == pytest.approx(3.0, rel=0.05)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_senseless_reports_are_passed_over(seconds: float) -> None:
    model = roofline()
    before = model.curve()
    model.observe(4, seconds, 1.0, 100.0)
    model.observe(0, 0.01, 1.0, 100.0)
    assert model.curve() == before
