"""The benchmark of modes computes ratios, goals and contenders from the seconds of its rounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.policy.cells import round_tokens
from bench.policy.figures import MeasuredCell, figures_of, promising, rotated, verdict
from bench.policy.rounds import requests_of, spoilt, with_drafts

MODES = {"plain": 1.0, "fixed 4": 0.5, "fixed 8": 0.6, "toggle 4": 0.51, "toggle 16": 0.8}
MODES |= {"adaptive": 0.75, "solver": 0.7}


def cell(changed: Mapping[str, float] = {}, **wrong: Sequence[float]) -> MeasuredCell:
    """Return a cell of 15 rounds at machine speeds that differ by a factor of 3; modes take what is given."""
    speeds = [1 + k * 2 / 14 for k in range(15)]
    times = MODES | {"planner": 0.5} | changed
    seconds: dict[str, Sequence[float]] = {mode: [each * s for s in speeds] for mode, each in times.items()}
    cold = {mode: 4.0 for mode in times if mode not in ("plain", "fixed 4", "fixed 8")}
    return MeasuredCell("m", 8, 0.15, 100, seconds | wrong, cold, [0.1, 0.2, 0.6])


def test_modes_are_compared_within_rounds_so_that_a_machine_s_speed_does_not_matter() -> None:
    for name, ratio in cell().intervals.items():
        assert ratio.low == pytest.approx(ratio.high), name
    row = cell().row()
    assert row["best_fixed"] == "fixed 4"
    assert row["planner_vs_plain"] == pytest.approx(2.0)
    assert row["planner_vs_best_fixed"] == pytest.approx(1.0)
    assert (row["toggle_worst"], row["toggle_vs_plain"]) == ("toggle 16", pytest.approx(1.25))
    assert row["plain_rate"] == pytest.approx(100 / 2)
    assert row["planner_cold"] == pytest.approx(0.5 * 2 / 4)


def test_where_no_length_pays_the_planner_is_compared_with_plain_decoding() -> None:
    made = cell({"fixed 4": 1.5, "fixed 8": 1.4, "planner": 1.25})
    assert made.best_fixed == "fixed 8"
    assert made.intervals["planner_vs_best_fixed"].median == pytest.approx(0.8)


def test_the_best_length_is_picked_in_other_rounds_than_it_is_compared_in() -> None:
    """Two lengths that are equally fast on average, of which one is lucky in even and the other in odd rounds."""
    lucky, unlucky = [0.4, 0.6] * 7 + [0.4], [0.6, 0.4] * 7 + [0.6]
    made = cell(**{"fixed 4": lucky, "fixed 8": unlucky, "planner": [0.5] * 15})
    assert made.ratio_to_best("planner").median == pytest.approx(0.6 / 0.5)
    assert made.ratio("planner", made.best).median == pytest.approx(0.4 / 0.5)


def test_the_figures_are_of_the_worst_cell_and_the_worst_toggle() -> None:
    slow = cell({"planner": 0.8, "toggle 4": 1.25})
    figures = figures_of([cell(), slow])
    assert figures["planner_vs_best_fixed_min"] == pytest.approx(0.5 / 0.8)
    assert figures["worst_ratio_vs_plain"] == pytest.approx(0.8)
    assert figures["planner_worst_vs_plain"] == pytest.approx(1.25)
    assert figures["step_time_error_median"] == pytest.approx(0.2)


def test_an_upper_end_is_the_least_of_all_cells() -> None:
    """The worst median may be of a cell whose rounds say little; another one then decides."""
    vague = [0.6] * 8 + [0.2] * 7
    narrow = cell({"planner": 0.55})
    unsure = cell({"plain": 1.0}, **{"fixed 4": [0.5] * 15, "planner": vague})
    figures = figures_of([narrow, unsure])
    assert figures["planner_vs_best_fixed_min"] == pytest.approx(0.5 / 0.6)
    assert figures["planner_vs_best_fixed_min_upper"] == pytest.approx(0.5 / 0.55)


@pytest.mark.parametrize(
    ("value", "upper", "found"), [(0.98, 1.1, "met"), (0.96, 0.97, "within error"), (0.9, 0.969, "missed")]
)
def test_a_goal_is_missed_only_where_the_whole_interval_lies_below_it(
    value: float, upper: float, found: str
) -> None:
    assert verdict(value, upper, 0.97) == found


def test_lengths_that_cannot_win_get_no_more_rounds() -> None:
    seconds = {1: [1.0, 9.0, 1.0], 2: [0.9], 4: [1.3], 8: [1.4], 16: [0.5, 3.0]}
    assert promising(seconds, most=5, within=1.5) == [1, 2, 4]
    assert promising(seconds, most=2, within=1.5) == [1, 2]


@given(
    st.dictionaries(st.integers(1, 16), st.lists(st.floats(0.1, 10), min_size=1), min_size=1),
    st.integers(1, 4),
)
def test_the_fastest_length_always_stays(seconds: dict[int, list[float]], most: int) -> None:
    kept = promising(seconds, most, 1.5)
    assert 0 < len(kept) <= most
    assert kept == sorted(kept)


@pytest.mark.parametrize("n", [2, 6, 7, 8])
def test_in_enough_rounds_every_mode_has_every_place_and_every_neighbour_before_it(n: int) -> None:
    modes = [str(k) for k in range(n)]
    orders = [rotated(modes, turn) for turn in range(2 * n)]
    assert all(sorted(order) == modes for order in orders)
    for place in range(n):
        assert set(Counter(order[place] for order in orders).values()) == {2}
    before = Counter((b, a) for order in orders for a, b in pairwise(order))
    for i in range(n):
        assert before[modes[i], modes[i - 1]] == before[modes[i - 1], modes[i]]


def test_requests_are_the_same_every_time_and_end_one_after_the_other() -> None:
    made = requests_of(32, 48, 64)
    assert made == requests_of(32, 48, 64)
    lengths = {each.sampling.max_tokens for each in made}
    assert len(lengths) > 8
    assert min(lengths) >= 24
    assert max(lengths) <= 48


def test_so_many_tokens_of_a_draft_are_wrong() -> None:
    truth = [k % 64 for k in range(20_000)]
    for wrong in (0.0, 0.15, 0.95, 1.0):
        made = spoilt(truth, wrong, 64, Random(0))
        share = sum(a != b for a, b in zip(truth, made, strict=True)) / len(truth)
        assert share == pytest.approx(wrong, abs=0.01)
        assert all(0 <= token < 64 for token in made)
    request = requests_of(8, 48, 64)
    drafted = with_drafts(request, {each.sample_id: truth[:48] for each in request}, 0.0, 64)
    assert [each.given for each in drafted] == [tuple(truth[:48])] * 8
    turns = [
        with_drafts(request, {each.sample_id: truth[:48] for each in request}, 0.4, 64, turn)
        for turn in (-1, 0, 0, 1)
    ]
    assert turns[1] == turns[2], "every mode has the same drafts in a round"
    assert len({each[0].given for each in turns}) == 3


def test_a_slow_engine_gets_shorter_rounds() -> None:
    assert [round_tokens(seconds) for seconds in (1e-4, 2.8e-3, 3.7e-3, 1.0)] == [80, 64, 48, 40]
