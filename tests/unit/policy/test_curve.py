"""Compiled curves of step times: the model's own times, sooner."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.policy import residual
from services.policy.curve import Curves, compiled
from services.policy.residual import DRAFTS, Residual
from services.policy.step_time import StepTime
from tests.unit.policy.test_step_time import ARCHITECTURE, contexts, drafted, models, requests

WIDTHS = st.lists(st.integers(0, 4096), min_size=1, max_size=8)


def test_both_go_by_the_same_numbers() -> None:
    assert compiled.SAME == residual.SAME


@settings(deadline=None)
@given(models, requests, WIDTHS, contexts)
def test_a_curve_is_what_the_model_says(
    model: StepTime, requests: int, drafted: list[int], context: int
) -> None:
    curve = Curves(model).of(requests, context)
    wanted = model.seconds(requests, requests + np.array([0, *drafted]), context)
    assert curve.plain == curve.raw_seconds(0) == pytest.approx(wanted[0])
    assert [curve.raw_seconds(each) for each in drafted] == pytest.approx(wanted[1:].tolist())
    assert [curve.seconds(each) for each in drafted] == [curve.raw_seconds(each) for each in drafted]


@given(models, requests, drafted, contexts, st.floats(0.1, 9.0), st.floats(-1e-2, 1e-2))
def test_a_corrected_curve_is_linear_within_its_limit(
    model: StepTime, requests: int, drafted: int, context: int, factor: float, offset: float
) -> None:
    raw = Curves(model).of(requests, context)
    corrected = raw.corrected(factor, offset, 4.0)
    before = raw.raw_seconds(drafted)
    wanted = np.clip(factor * before + offset, before / 4.0, before * 4.0)
    assert corrected.seconds(drafted) == pytest.approx(float(wanted))
    # It is another one.
    assert (corrected.raw_seconds(drafted), raw.seconds(drafted), corrected.plain) == (
        before,
        before,
        raw.plain,
    )


def test_plain_decoding_has_its_own_share_where_drafts_cost_nothing() -> None:
    shares = tuple(np.linspace(-0.2, 0.3, len(DRAFTS)).tolist())
    left = Residual(requests=(1.0,), lengths=(9.0,), shares=((shares,),))
    model = StepTime(architecture=ARCHITECTURE, throughput=1e30, bandwidth=1e12, base=1.0, residual=left)
    curve = Curves(model).of(4, 36)
    rough = float(model.rough_seconds(4, 4, 36))
    assert [curve.seconds(each) for each in (0, 8, 64)] == pytest.approx([0.8 * rough] * 3)
