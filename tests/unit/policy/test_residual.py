"""What a step-time model leaves over: learned where it comes again, and looked up."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from services.policy.residual import DRAFTS, Residual, corrected

BATCHES, LENGTHS = (1.0, 8.0, 64.0), (64.0, 1024.0)
share = st.floats(-0.5, 0.5)
rows = st.lists(share, min_size=len(DRAFTS), max_size=len(DRAFTS))


def plane(count: int, each: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(each, min_size=count, max_size=count)


residuals = st.builds(
    lambda shares: Residual.model_validate({"requests": BATCHES, "lengths": LENGTHS, "shares": shares}),
    plane(len(BATCHES), plane(len(LENGTHS), rows)),
)
rising = st.lists(st.floats(0, 1), min_size=len(DRAFTS), max_size=len(DRAFTS)).map(
    lambda steps: (1e-3 + np.cumsum(steps)).tolist()
)

# A machine whose steps take up to 8 % more or less than is predicted.
CELLS = [
    (2.0**batch, length, drafts) for batch, length, drafts in product(range(8), (50.0, 150.0, 420.0), DRAFTS)
]


def columns(cells: list[tuple[float, float, float]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    requests, lengths, drafts = np.array(cells).T
    return requests, lengths, drafts


def ripple(requests: np.ndarray, lengths: np.ndarray, drafts: np.ndarray) -> np.ndarray:
    return 0.08 * np.sin(np.log2(requests)) * np.cos(np.log2(1 + drafts) + np.log2(lengths) / 3)


def looked_up(residual: Residual, cells: list[tuple[float, float, float]]) -> np.ndarray:
    return np.array([residual.of(n, length)[DRAFTS.index(drafts)] for n, length, drafts in cells])


def test_what_comes_again_is_learned_where_it_was_not_measured() -> None:
    seen, unseen = (
        [cell for i, cell in enumerate(CELLS) if (i % 5 == 2) == left_out] for left_out in (False, True)
    )
    random = np.random.default_rng(0)
    measured = ripple(*columns(seen)) + random.normal(0, 0.01, len(seen))
    residual = Residual.learned(*columns(seen), measured)
    assert residual is not None
    wanted = ripple(*columns(unseen))
    missed = looked_up(residual, unseen) - wanted
    assert np.abs(missed).mean() < 0.3 * np.abs(wanted).mean()


@pytest.mark.parametrize("seed", range(8))
def test_noise_is_not_learned(seed: int) -> None:
    noise = np.random.default_rng(seed).normal(0, 0.05, len(CELLS))
    residual = Residual.learned(*columns(CELLS), noise)
    # At most a trace of it: a chance likeness of neighbours.
    assert residual is None or np.abs(looked_up(residual, CELLS)).mean() < 0.5 * np.abs(noise).mean()


def test_nothing_left_over_is_no_residual() -> None:
    assert Residual.learned(*columns(CELLS), np.zeros(len(CELLS))) is None


def test_what_cannot_be_believed_is_cut() -> None:
    residual = Residual.learned(*columns(CELLS), np.full(len(CELLS), 4.0))
    assert residual is not None
    assert max(looked_up(residual, CELLS)) == 0.5


@given(residuals, st.floats(1, 512), st.floats(1, 1e5))
def test_one_place_and_many_are_looked_up_alike(residual: Residual, requests: float, length: float) -> None:
    one = residual.of(requests, length)
    assert residual.of([requests, 1.0], length)[0] == pytest.approx(one)
    flat = [each for plane in residual.shares for row in plane for each in row]
    assert min(flat) - 1e-12 <= min(one)
    assert max(one) <= max(flat) + 1e-12


@given(residuals)
def test_at_its_places_it_is_what_is_kept_and_beyond_them_the_nearest(residual: Residual) -> None:
    for i, requests in enumerate(BATCHES):
        for j, length in enumerate(LENGTHS):
            assert residual.of(requests, length) == pytest.approx(residual.shares[i][j])
    assert residual.of(4096, 9) == pytest.approx(residual.shares[-1][0])
    assert residual.of(0.5, 1e6) == pytest.approx(residual.shares[0][-1])


@given(rising, rows, st.lists(st.floats(0, 12), min_size=2, max_size=9))
def test_times_rise_with_what_is_predicted_whatever_is_left_over(
    predicted: list[float], shares: list[float], at: list[float]
) -> None:
    inside = np.sort([max(each, predicted[0]) for each in at])
    found = corrected(inside, np.array(predicted), np.array(shares))
    assert (np.diff(found) >= -1e-9).all()
    assert found[0] >= 0.5 * predicted[0] - 1e-12


def test_plain_decoding_has_its_own_share_where_drafts_are_predicted_to_cost_nothing() -> None:
    flat, shares = np.full(len(DRAFTS), 2.0), np.linspace(-0.2, 0.3, len(DRAFTS))
    assert corrected(np.array(2.0), flat, shares) == pytest.approx(1.6)
    nearly = flat * (1 + 1e-15 * np.arange(len(DRAFTS)))
    assert corrected(nearly, nearly, shares) == pytest.approx(1.6)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"requests": (8, 1, 64)}, "rise"),
        ({"lengths": (64, 64)}, "rise"),
        ({"requests": ()}, "requests"),
        ({"lengths": (0, 9)}, "lengths"),
        ({"shares": [[[0.0] * 6] * 2] * 2}, "3 x 2 x 6"),
        ({"shares": [[[0.0] * 5] * 2] * 3}, "3 x 2 x 6"),
        ({"shares": [[[-1.0] * 6] * 2] * 3}, "shares"),
        ({"shares": [[[float("nan")] * 6] * 2] * 3}, "shares"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(change: dict[str, Any], named: str) -> None:
    whole = {"requests": BATCHES, "lengths": LENGTHS, "shares": [[[0.0] * 6] * 2] * 3}
    Residual.model_validate(whole)
    with pytest.raises(ValidationError, match=named):
        Residual.model_validate(whole | change)
