"""Tokens are compared while they have the same prefix."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.comparison import Comparison, first_difference
from paceline import SampleKey

A, B = SampleKey("p", 0), SampleKey("p", 1)
responses = st.lists(st.integers(0, 2), max_size=6)


@given(responses, responses)
def test_the_first_difference_is_where_the_common_prefix_ends(one: list[int], other: list[int]) -> None:
    place = first_difference(one, other)
    if place is None:
        assert one == other
    else:
        assert one[:place] == other[:place]
        assert one[: place + 1] != other[: place + 1]


def test_what_follows_a_difference_is_not_compared() -> None:
    comparison = Comparison()
    comparison.add("x", {A: [1, 2, 3, 4], B: [5, 6]}, {A: [1, 9, 9, 9], B: [5, 6]})
    assert (comparison.compared, comparison.differing) == (2 + 2, 1)
    assert comparison.differing_share == 1 / 4


def test_a_response_that_ends_early_differs_there() -> None:
    comparison = Comparison()
    comparison.add("x", {A: [1, 2]}, {A: [1]})
    assert (comparison.compared, comparison.differing) == (2, 1)


def test_other_samples_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match="x, step 3: the samples are not the same"):
        Comparison().add("x, step 3", {A: [1]}, {B: [1]})


def test_nothing_compared_differs_in_nothing() -> None:
    assert Comparison().differing_share == 0.0
