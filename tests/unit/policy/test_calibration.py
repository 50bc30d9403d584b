"""The fit: it finds the model that made the times, and is refused where none did."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.policy.calibration import BadFit, Errors, TooFewPoints, calibrate, require_good
from services.policy.step_time import StepTime
from services.policy.sweep import Point, Sweep
from tests.unit.policy.test_step_time import ARCHITECTURE

THROUGHPUT, BANDWIDTH = 300e12, 2e12
TRUTH = StepTime(
    architecture=ARCHITECTURE,
    throughput=THROUGHPUT,
    bandwidth=1.6e12,
    kv_scale=0.7,
    base=8e-4,
    per_request=6e-6,
    per_row=2e-6,
    per_attended_token=4e-9,
    verify_per_request=4e-6,
)
CELLS = [
    (requests, requests * (1 + width), requests * length)
    for requests in (1, 4, 16, 64, 256)
    for length in (256, 4096, 16384)
    for width in (0, 1, 4, 16)
]


def swept(model: StepTime, noise: float = 0.0, seed: int = 0) -> Sweep:
    """What a machine would show that is like the model, every fourth point held out."""
    random = np.random.default_rng(seed)
    return Sweep(
        tuple(
            Point(
                requests=requests,
                rows=rows,
                context=context,
                seconds=float(model.seconds(requests, rows, context)) * math.exp(random.normal(0, noise)),
                # Eleven and four have no common factor: every kind of point is held out somewhere.
                held_out=i * 11 % 4 == 3 if i // 4 % 4 else i % 4 == 2,
            )
            for i, (requests, rows, context) in enumerate(CELLS)
        )
    )


def test_the_model_that_made_the_times_is_found() -> None:
    fit = calibrate(ARCHITECTURE, THROUGHPUT, BANDWIDTH, swept(TRUTH))
    assert fit.held_out.median < 0.01
    assert fit.held_out.p90 < 0.02
    assert fit.held_out.points + fit.fitted.points == len(CELLS)
    found = fit.step_time
    # Per byte of KV; bandwidth and base by themselves can stand in for each other where memory is the limit.
    assert found.kv_scale / found.bandwidth == pytest.approx(TRUTH.kv_scale / TRUTH.bandwidth, rel=0.02)
    assert found.bandwidth == pytest.approx(TRUTH.bandwidth, rel=0.1)


@settings(max_examples=25)
@given(
    st.floats(0.5e12, 4e12),
    st.floats(0.05, 8),
    st.floats(0, 5e-3),
    st.floats(0, 5e-5),
    st.floats(0, 1e-4),
)
def test_any_machine_of_this_kind_is_described(
    bandwidth: float, kv_scale: float, base: float, per_request: float, per_row: float
) -> None:
    truth = TRUTH.model_copy(
        update={
            "bandwidth": bandwidth,
            "kv_scale": kv_scale,
            "base": base,
            "per_request": per_request,
            "per_row": per_row,
        }
    )
    fit = calibrate(ARCHITECTURE, THROUGHPUT, BANDWIDTH, swept(truth))
    assert fit.held_out.median < 0.05
    assert StepTime.model_validate(fit.step_time.model_dump()) == fit.step_time


def test_noise_of_a_few_percent_is_told_from_the_model() -> None:
    fit = calibrate(ARCHITECTURE, THROUGHPUT, BANDWIDTH, swept(TRUTH, noise=0.03))
    require_good(fit, 0.05, 0.1)
    assert fit.fitted.median > 0.005


def test_what_the_rooflines_leave_over_is_learned() -> None:
    sweep = swept(TRUTH, noise=0.005)
    points = [
        # Kernels for few rows, and others for many.
        point.model_copy(update={"seconds": point.seconds * (0.9 if 8 < point.rows < 300 else 1.1)})
        for point in sweep.points
    ]
    fit = calibrate(ARCHITECTURE, THROUGHPUT, BANDWIDTH, replace(sweep, points=tuple(points)))
    assert fit.step_time.residual is not None
    rough = fit.step_time.model_copy(update={"residual": None})
    measured = np.array([point.seconds for point in points])
    predicted = rough.seconds(*(sweep.column(name) for name in ("requests", "rows", "context")))
    without = Errors.of(predicted[sweep.held_out], measured[sweep.held_out])
    assert fit.held_out.median < 0.7 * without.median


def test_held_out_points_have_no_say_in_the_fit() -> None:
    sweep = swept(TRUTH)
    points = [
        point.model_copy(update={"seconds": point.seconds * 3}) if point.held_out else point
        for point in sweep.points
    ]
    fit = calibrate(ARCHITECTURE, THROUGHPUT, BANDWIDTH, replace(sweep, points=tuple(points)))
    assert fit.step_time == calibrate(ARCHITECTURE, THROUGHPUT, BANDWIDTH, sweep).step_time
    assert fit.fitted.median < 0.01
    assert fit.held_out.median == pytest.approx(2 / 3, rel=0.05)


def test_a_bad_fit_is_refused_with_its_figures() -> None:
    fit = calibrate(ARCHITECTURE, THROUGHPUT, BANDWIDTH, swept(TRUTH, noise=0.8))
    with pytest.raises(BadFit, match=r"median \d+\.\d%, p90 \d+\.\d%") as refused:
        require_good(fit, 0.15, 0.35)
    assert refused.value.fit is fit


def test_a_fit_at_the_limit_is_taken_and_nan_is_not() -> None:
    fit = calibrate(ARCHITECTURE, THROUGHPUT, BANDWIDTH, swept(TRUTH, noise=0.03))
    require_good(fit, fit.held_out.median, fit.held_out.p90)
    with pytest.raises(BadFit):
        require_good(replace(fit, held_out=Errors(math.nan, math.nan, 9)), 1, 1)


@pytest.mark.parametrize("missing", ["plain", "verifying", "held out"])
def test_too_few_points_are_refused(missing: str) -> None:
    def keep(point: Point) -> bool:
        is_plain = point.rows == point.requests
        if missing == "held out":
            return not point.held_out
        return is_plain != (missing == "plain")

    sweep = Sweep(tuple(filter(keep, swept(TRUTH).points)))
    with pytest.raises(TooFewPoints):
        calibrate(ARCHITECTURE, THROUGHPUT, BANDWIDTH, sweep)
