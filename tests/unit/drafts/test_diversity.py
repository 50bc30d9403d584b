"""Alike groups are reused less, by a share that can be computed beforehand."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from services.generation.draft_cache.cache import NGRAM, distinct_share, keep, reuse_allowed

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=30)


def by_hand(rollouts: list[list[int]]) -> float:
    """Return the definition, with sets."""
    grams = []
    for rollout in rollouts:
        if rollout:
            count = max(1, len(rollout) - NGRAM + 1)
            grams.append({tuple(rollout[at : at + NGRAM]) for at in range(count)})
    total = sum(len(each) for each in grams)
    return len(set().union(*grams)) / total if total else 1.0


@given(st.lists(tokens, max_size=6), st.data())
def test_the_share_is_that_of_the_definition(rollouts: list[list[int]], data: st.DataObject) -> None:
    if rollouts:
        # Shared stretches, which random tokens of 32 bit do not have.
        rollouts = [*rollouts, rollouts[data.draw(st.integers(0, len(rollouts) - 1))][:12]]
    assert distinct_share(rollouts) == by_hand(rollouts)


@given(st.lists(st.lists(st.integers(0, 2), max_size=20), max_size=6))
def test_the_share_is_that_of_the_definition_with_few_token_ids(rollouts: list[list[int]]) -> None:
    assert distinct_share(rollouts) == by_hand(rollouts)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=40), st.integers(1, 10))
def test_copies_of_one_rollout_have_the_least_share(rollout: list[int], copies: int) -> None:
    assert distinct_share([rollout] * copies) == pytest.approx(1 / copies)


def test_what_a_rollout_repeats_within_itself_is_not_held_against_it() -> None:
    assert distinct_share([[7] * 50, [8] * 50]) == 1.0
    assert distinct_share([[1, 2], [1, 2, 0, 0]]) == 1.0, "padding is no token"
    assert distinct_share([]) == distinct_share([[]]) == 1.0


@given(st.integers(0, 2**64 - 1), st.floats(0.01, 1))
def test_groups_at_the_floor_or_above_are_reused_whole(seed: int, floor: float) -> None:
    assert keep(seed, floor, floor)
    assert keep(seed, 1.0, floor)
    assert not keep(seed, 0.0, floor)


@given(st.integers(0, 2**64 - 1), st.floats(0, 1), st.floats(0, 1), st.floats(0.01, 1))
def test_more_diversity_never_means_less_reuse(seed: int, one: float, other: float, floor: float) -> None:
    less, more = sorted((one, other))
    assert keep(seed, less, floor) <= keep(seed, more, floor)


@pytest.mark.parametrize("distinct", [0.1, 0.3, 0.45])
def test_the_share_of_samples_that_reuse_falls_linearly(distinct: float) -> None:
    floor, draws = 0.5, 20_000
    kept = sum(keep(seed, distinct, floor) for seed in range(draws))
    # Five standard deviations of a binomial share are below 0.018 here.
    assert kept / draws == pytest.approx(distinct / floor, abs=0.018)


@settings(max_examples=30)
@given(st.integers(0, 2**64 - 1))
def test_the_decision_is_a_function_of_rollouts_floor_and_seed(seed: int) -> None:
    group = [[1, 2, 3, 4, 5, 6]] * 4
    assert reuse_allowed(group, 0.6, seed) == keep(seed, 0.25, 0.6)
    assert reuse_allowed(group, 0.25, seed)


@pytest.mark.parametrize("floor", [0.0, -0.5, 1.5, float("nan")])
def test_a_floor_outside_its_range_is_refused(floor: float) -> None:
    with pytest.raises(ValueError, match="floor"):
        reuse_allowed([[1]], floor, 1)
