"""Intervals of medians: the right ranks, and as often right as they say."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.intervals import median_interval

values = st.lists(st.integers(-1000, 1000), min_size=6, max_size=40)


@pytest.mark.parametrize(
    ("n", "rank"), [(6, 1), (8, 1), (9, 2), (15, 4), (20, 6), (25, 8), (50, 18), (100, 40)]
)
def test_the_ranks_are_those_of_the_tables(n: int, rank: int) -> None:
    """The table of 95 % intervals of the median in Conover, Practical Nonparametric Statistics."""
    found = median_interval(range(1, n + 1))
    assert (found.low, found.high) == (rank, n + 1 - rank)
    assert found.median == (n + 1) / 2


@given(values, st.randoms(use_true_random=False))
def test_order_and_scale_do_not_matter(some: Sequence[int], random: Random) -> None:
    shuffled = random.sample(list(some), len(some))
    assert median_interval(shuffled) == median_interval(some)
    assert median_interval([-2 * each for each in some]) == tuple(
        -2 * each for each in reversed(median_interval(some))
    )


@given(values)
def test_the_interval_holds_the_median_and_no_more_than_the_values(some: Sequence[int]) -> None:
    low, middle, high = median_interval(some)
    assert min(some) <= low <= middle <= high <= max(some)


def test_a_few_wild_values_do_not_move_the_interval() -> None:
    calm = [1.0 + k / 100 for k in range(15)]
    wild = [*calm[:-3], 50.0, 60.0, 70.0]
    assert median_interval(wild) == median_interval(calm)


@pytest.mark.parametrize("n", [6, 15, 16, 31])
def test_it_covers_the_true_median_as_often_as_it_says(n: int) -> None:
    """Of a skewed distribution whose median is 1."""
    random, tried = Random(n), 4000
    intervals = [median_interval([2 ** random.gauss(0, 1) for _ in range(n)]) for _ in range(tried)]
    covered = sum(each.low <= 1 <= each.high for each in intervals) / tried
    assert 0.94 <= covered <= 0.985


def test_too_few_values_are_refused() -> None:
    with pytest.raises(ValueError, match="5 values"):
        median_interval([1.0] * 5)
    with pytest.raises(ValueError, match="no interval"):
        median_interval([])
