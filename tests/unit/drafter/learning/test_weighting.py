"""Weights of samples by reward."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.drafter.learning.data import HIGHEST, LOWEST, Weighting, weigh, weights_of
from tests.unit.drafter.learning.samples import rollout

known = st.floats(allow_nan=False, allow_infinity=False)
rewards = st.lists(st.tuples(st.one_of(st.none(), st.floats(), known), st.integers(0, 3)), max_size=30)


@given(rewards, st.sampled_from(Weighting))
def test_weights_are_positive_of_mean_one_and_bounded(
    given_rewards: list[tuple[float | None, int]], weighting: Weighting
) -> None:
    weights = weigh([r for r, _ in given_rewards], [g for _, g in given_rewards], weighting)
    assert len(weights) == len(given_rewards)
    assert all(0 < weight < math.inf for weight in weights)
    if weights:
        assert sum(weights) / len(weights) == pytest.approx(1)
        assert max(weights) / min(weights) <= HIGHEST / LOWEST * (1 + 1e-9)


@given(rewards)
def test_a_higher_reward_never_weighs_less(given_rewards: list[tuple[float | None, int]]) -> None:
    for weighting, one_group in ((Weighting.REWARD, False), (Weighting.GROUP, True)):
        values = [r for r, _ in given_rewards]
        groups = [0 if one_group else g for _, g in given_rewards]
        weights = weigh(values, groups, weighting)
        pairs = sorted(
            (r, w) for r, w in zip(values, weights, strict=True) if r is not None and math.isfinite(r)
        )
        assert all(a <= b * (1 + 1e-9) for (_, a), (_, b) in pairwise(pairs))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20), st.floats(1e-3, 1e6))
def test_the_scale_of_rewards_does_not_matter(values: list[float], scale: float) -> None:
    for weighting in Weighting:
        plain = weigh(values, [0] * len(values), weighting)
        scaled = weigh([value * scale for value in values], [0] * len(values), weighting)
        assert scaled == pytest.approx(plain, rel=1e-3)


@pytest.mark.parametrize("weighting", Weighting)
@pytest.mark.parametrize(
    "values", [[0.0, 0.0, 0.0], [0.5, 0.5], [None, None], [None, 0.25], [math.nan, 1.0], []]
)
def test_rewards_that_say_nothing_weigh_the_same(weighting: Weighting, values: list[float | None]) -> None:
    assert weigh(values, [0] * len(values), weighting) == pytest.approx([1.0] * len(values))


def test_reward_is_in_proportion_between_the_bounds() -> None:
    assert weigh([1.0, 0.5, 0.25], [0] * 3, Weighting.REWARD) == pytest.approx([12 / 7, 6 / 7, 3 / 7])
    wrong, right = weigh([0.0, 1.0], [0, 0], Weighting.REWARD)
    assert right / wrong == pytest.approx(2.0 / LOWEST)


def test_group_compares_with_the_samples_of_the_same_prompt_alone() -> None:
    hard = [rollout((1,), (2, 3), slot, reward) for slot, reward in enumerate((0.0, 0.2))]
    easy = [rollout((2,), (2, 3), slot, reward) for slot, reward in enumerate((0.9, 0.9))]
    worse, better, *same = weights_of([*hard, *easy], Weighting.GROUP)
    assert worse < same[0] == same[1] < better


def test_none_is_plain_distillation() -> None:
    assert weigh([0.0, 5.0, None], [0, 0, 0], Weighting.NONE) == [1.0, 1.0, 1.0]


def test_every_reward_needs_a_group() -> None:
    with pytest.raises(ValueError, match="2 rewards, but 1 groups"):
        weigh([1.0, 2.0], [0], Weighting.NONE)
