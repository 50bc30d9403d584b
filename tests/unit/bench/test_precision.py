"""Differences of two runs of the same samples."""

from __future__ import annotations

import pytest

from bench.coupled.engine_process import RunnerUp
from bench.precision.__main__ import JudgedRun, compare, joined, same_share


def run(runners_up: dict[str, list[tuple[int, float]]], **tokens: list[int]) -> JudgedRun:
    """A run whose samples have these tokens and runners-up."""
    return JudgedRun(tokens, {name: [RunnerUp(*each) for each in runners_up[name]] for name in tokens})


def test_equal_runs_have_no_difference_and_count_every_token() -> None:
    second = {"a": [(9, 1.0)] * 3, "b": [(9, 1.0)]}
    found = compare(run(second, a=[1, 2, 3], b=[4]), run(second, a=[1, 2, 3], b=[4]))
    assert (found.compared, found.samples, found.found) == (4, 2, ())
    assert (found.per_thousand, found.largest_margin, found.no_near_ties) == (0, 0, 0)


def test_only_the_first_difference_of_a_sample_counts() -> None:
    ours = run({"a": [(9, 1.0), (5, 0.01), (9, 1.0), (9, 1.0)]}, a=[1, 2, 3, 4])
    theirs = run({"a": [(9, 1.0), (2, 0.02), (9, 1.0), (9, 1.0)]}, a=[1, 5, 7, 8])
    found = compare(ours, theirs)
    assert found.compared == 2
    assert [(each.sample, each.position, each.margin) for each in found.found] == [("a", 1, 0.02)]
    assert found.per_thousand == 500
    assert found.no_near_ties == 0


@pytest.mark.parametrize(("here", "there"), [((6, 0.01), (2, 0.01)), ((5, 0.01), (6, 0.01))])
def test_a_difference_is_no_near_tie_unless_each_drew_the_runner_up_of_the_other(
    here: tuple[int, float], there: tuple[int, float]
) -> None:
    found = compare(run({"a": [here]}, a=[2]), run({"a": [there]}, a=[5]))
    assert found.no_near_ties == 1


def test_a_run_that_ends_earlier_is_compared_up_to_its_end() -> None:
    ours, theirs = run({"a": [(9, 1.0)] * 3}, a=[1, 2, 3]), run({"a": [(9, 1.0)] * 2}, a=[1, 2])
    assert compare(ours, theirs).compared == 2


def test_runs_of_other_samples_and_without_runners_up_are_refused() -> None:
    one = run({"a": [(9, 1.0)]}, a=[1])
    with pytest.raises(ValueError, match="other samples"):
        compare(one, run({"b": [(9, 1.0)]}, b=[1]))
    with pytest.raises(ValueError, match="has 0 runners-up"):
        compare(one, run({"a": []}, a=[1]))


def test_comparisons_add_up() -> None:
    same = compare(run({"a": [(9, 1.0)] * 3}, a=[1, 2, 3]), run({"a": [(9, 1.0)] * 3}, a=[1, 2, 3]))
    other = compare(run({"a": [(5, 0.1)]}, a=[2]), run({"a": [(2, 0.2)]}, a=[5]))
    whole = joined([same, other])
    assert (whole.compared, whole.samples, len(whole.found), whole.largest_margin) == (4, 2, 1, 0.2)
    assert whole.per_thousand == 250


def test_the_share_of_equal_samples_falls_with_their_length() -> None:
    assert same_share(0, 8000) == 1
    assert same_share(1, 1000) == pytest.approx(0.3677, abs=1e-4)
