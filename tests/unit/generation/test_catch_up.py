"""Which samples a drafter reads first."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.generation.engine.draft_models.eagle3 import allot

counts = st.lists(st.integers(0, 300), min_size=1, max_size=40)


def test_those_that_are_nearly_there_come_first_and_the_last_gets_a_part() -> None:
    assert allot(np.array([100, 3, 70, 1]), 80).tolist() == [6, 3, 70, 1]
    assert allot(np.array([100, 100]), 80).tolist() == [80, 0]
    assert allot(np.array([5, 5]), 80).tolist() == [5, 5]


@given(counts, st.integers(1, 1000))
def test_all_of_the_budget_is_used_and_no_more(missing: list[int], budget: int) -> None:
    allotted = allot(np.array(missing), budget)
    assert allotted.sum() == min(budget, sum(missing))
    assert ((allotted >= 0) & (allotted <= missing)).all()
    # One sample at most is left in the middle.
    assert ((allotted > 0) & (allotted < missing)).sum() <= 1


@given(counts, st.integers(1, 1000))
def test_nobody_waits_for_one_that_misses_more(missing: list[int], budget: int) -> None:
    short = np.array(missing)
    done = allot(short, budget) == short
    if done.any() and not done.all():
        assert short[done].max() <= short[~done].min()


@given(counts, st.integers(1, 50))
def test_everybody_catches_up(missing: list[int], budget: int) -> None:
    left, rounds = np.array(missing), 0
    while left.any():
        left = left - allot(left, budget)
        rounds += 1
    assert rounds == -(-sum(missing) // budget)
