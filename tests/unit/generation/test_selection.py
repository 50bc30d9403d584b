"""What is chosen of offers, against the same written out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.generation.drafting.drafter import Offers
from services.generation.drafting.row_grid import row_counts
from services.generation.drafting.selection import Line, best_picks, flaw, least_row, longest, survivals
from services.policy.curve import Curve, Curves
from services.policy.step_time import StepTime
from tests.unit.policy.test_step_time import ARCHITECTURE, models

N, WIDTH = 5, 4
probabilities = st.sampled_from((0.0, 0.1, 0.5, 0.8, 0.95, 1.0)) | st.floats(0, 1)
one_offer = st.lists(st.lists(probabilities, min_size=3, max_size=3), min_size=N, max_size=N)
several = st.lists(one_offer, min_size=1, max_size=3)
rooms = st.lists(st.integers(-1, WIDTH), min_size=N, max_size=N)
curves = st.builds(
    lambda model, context, factor, offset: Curves(model).of(N, context).corrected(factor, offset, 4.0),
    models,
    st.integers(N, 10**6),
    st.floats(0.3, 3.0),
    st.floats(-1e-3, 1e-3),
)


def offers_of(acceptance: list[list[float]]) -> Offers:
    return Offers(np.ones((N, 3), np.int32), np.array(acceptance))


def survival_of(made: list[list[list[float]]], room: list[int]) -> np.ndarray:
    return survivals([offers_of(each) for each in made], np.array(room, np.int64), WIDTH)


@given(several, rooms)
def test_survival_is_the_product_within_the_room(made: list[list[list[float]]], room: list[int]) -> None:
    found = survival_of(made, room)
    for drafter, each in enumerate(made):
        for i in range(N):
            wanted = [float(np.prod(each[i][: j + 1])) if j < min(3, room[i]) else 0.0 for j in range(WIDTH)]
            assert found[drafter, i] == pytest.approx(wanted)


@given(several, rooms, st.floats(0, 1), st.floats(0, 1))
def test_the_longest_is_the_offer_that_promises_most(
    made: list[list[list[float]]], room: list[int], floor: float, survival_floor: float
) -> None:
    survival = survival_of(made, room)
    kept = survival.copy()
    kept[kept[:, :, 0] < floor] = 0.0
    kept[kept < survival_floor] = 0.0
    found = longest(survival, floor, survival_floor)
    totals = kept.sum(2)
    assert found.expected == pytest.approx(totals.max(0).sum())
    for i, (pick, length) in enumerate(zip(found.picks, found.lengths, strict=True)):
        assert totals[pick, i] == pytest.approx(totals[:, i].max())
        assert length == np.count_nonzero(kept[pick, i])


@settings(deadline=None)
@given(several, rooms, st.floats(0, 0.5), st.floats(1e-6, 0.5), curves)
def test_a_line_is_evaluated_by_its_best_tokens_and_the_curve(
    made: list[list[list[float]]], room: list[int], price: float, least: float, curve: Curve
) -> None:
    survival = survival_of(made, room)
    line, counts = Line(survival, best_picks(survival, price), least), row_counts(N, N * WIDTH)
    picked = survival[line.picks, np.arange(N)]
    above = np.maximum(survival - price, 0.0).sum(2)
    assert above[line.picks, np.arange(N)] == pytest.approx(above.max(0))
    tokens = np.sort(picked[picked >= least])[::-1]
    assert len(line) == len(tokens)
    rates = {
        count: (N + tokens[:count].sum()) / curve.seconds(count)
        for count in counts.tolist()
        if count <= len(tokens)
    }
    best, other = line.evaluate(counts, curve)
    assert best.rate == pytest.approx(max(rates.values()))
    assert best.rate == pytest.approx(rates[best.tokens])
    assert best.seconds == pytest.approx(curve.seconds(best.tokens))
    assert bool(other.tokens) == (len(rates) > 1)
    for rated in (best, other):
        if not rated.tokens:
            continue
        assert rated.rate == pytest.approx(rates[rated.tokens])
        assert rated.expected == pytest.approx(tokens[: rated.tokens].sum())
        lengths = line.cut(rated.tokens)
        assert lengths.sum() == rated.tokens
        taken = sum(picked[i, :length].sum() for i, length in enumerate(lengths))
        assert taken == pytest.approx(rated.expected)


@given(curves)
def test_the_least_row_is_the_flattest_piece_of_the_curve(curve: Curve) -> None:
    counts = row_counts(N, N * WIDTH)
    times = np.array([curve.seconds(count) for count in counts.tolist()])
    assert least_row(counts, curve) == pytest.approx((np.diff(times) / np.diff(counts)).min(), abs=1e-12)


def test_a_line_that_is_shorter_than_the_first_step_of_the_grid_is_tried_whole() -> None:
    survival = np.zeros((1, 200, 2))
    survival[0, :3, 0] = 0.9
    line = Line(survival, best_picks(survival, 0.0), 0.1)
    counts = row_counts(200, 400)
    assert counts[1] > 3
    # A step takes as long with a few tokens as without.
    slow = StepTime(architecture=ARCHITECTURE, throughput=1e30, bandwidth=1e9)
    curve = Curves(slow).of(200, 200)
    best, other = line.evaluate(counts, curve)
    assert best == other
    assert (best.tokens, best.expected) == (3, pytest.approx(2.7))
    assert list(line.cut(3)[:4]) == [1, 1, 1, 0]


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64, np.uint64])
def test_tokens_of_any_kind_of_integer_are_checked(dtype: type) -> None:
    right = Offers(np.array([[1, 9]], dtype), np.ones((1, 2)))
    assert flaw(right, 10) == ""
    assert "vocabulary of 9" in flaw(right, 9)
    if dtype is np.uint64:
        assert "vocabulary" in flaw(Offers(np.array([[1, 2**64 - 1]], dtype), np.ones((1, 2))), 10)


def test_what_is_no_token_or_no_probability_is_said() -> None:
    tokens = np.zeros((1, 2), np.int32)
    assert "vocabulary" in flaw(Offers(tokens.astype(float), np.ones((1, 2))), 10)  # type: ignore[arg-type]
    assert "vocabulary" in flaw(Offers(tokens - 1, np.ones((1, 2))), 10)
    for wrong in (np.nan, -0.1, 1.1):
        assert "probability" in flaw(Offers(tokens, np.array([[0.5, wrong]])), 10)
    assert "probability" in flaw(Offers(tokens, tokens), 10)  # type: ignore[arg-type]
    # Of another precision, and not side by side in memory.
    assert flaw(Offers(tokens, np.ones((2, 1), np.float32).T), 10) == ""  # type: ignore[arg-type]
