"""Decisions are good where step times are known, and where verification is priced wrong: the simulation says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.deciding import cell, fitted

MODEL = Path("examples/tinymath/model")


@pytest.mark.parametrize("price", [0.6, 1.0, 1.6])
@pytest.mark.parametrize(("samples", "wrong"), [(32, 0.02), (32, 0.4), (32, 0.95), (128, 0.4)])
def test_the_planner_is_as_good_as_the_best_fixed_length_and_the_toggle_as_plain_decoding(
    price: float, samples: int, wrong: float
) -> None:
    found = cell(fitted(MODEL), price, samples, wrong, rounds=1)
    assert found["planner_vs_best_fixed"] >= 0.97
    assert found["toggle_vs_plain"] >= 0.98
