"""How far a response repeats a rollout, against a comparison token by token."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.generation.draft_cache.cache import agreement
from tests.unit.generation.rollouts import rollout

letters = st.lists(st.integers(0, 1), max_size=12)


@given(st.lists(st.integers(0, 1), min_size=1, max_size=12), letters)
def test_counts_up_to_the_first_token_that_differs(cached: list[int], response: list[int]) -> None:
    expected = 0
    for ours, theirs in zip(response, cached, strict=False):
        if ours != theirs:
            break
        expected += 1
    assert agreement(rollout(tokens=cached), response) == expected


def test_a_large_token_is_not_taken_for_a_negative_one() -> None:
    assert agreement(rollout(tokens=[2**32 - 1, 5]), [2**32 - 1, 5, 6]) == 2
    assert agreement(rollout(tokens=[2**32 - 1]), [-1]) == 0
