"""Which layers and which tokens a head is made for, and how rollouts are cut into steps and passes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.drafter.learning.data import LearningSettings, default_layers
from services.drafter.learning.target import choose_vocabulary
from services.drafter.learning.unroll import passes, steps
from tests.unit.drafter.learning.samples import random_rollouts, rollout


@pytest.mark.parametrize(
    ("count", "layers"), [(2, (1,)), (3, (1, 2)), (4, (1, 2, 3)), (6, (2, 3, 4)), (36, (2, 18, 33))]
)
def test_features_come_from_three_heights(count: int, layers: tuple[int, ...]) -> None:
    assert default_layers(count) == layers


@given(st.integers(2, 100))
def test_layers_are_distinct_and_inside(count: int) -> None:
    layers = default_layers(count)
    assert list(layers) == sorted(set(layers))
    assert len(layers) == min(3, count - 1)
    assert layers[0] >= 1
    assert layers[-1] <= count - 1


def test_a_single_layer_is_not_enough() -> None:
    with pytest.raises(ValueError, match="no layer between"):
        default_layers(1)


@pytest.mark.parametrize(
    "wrong", [{"depth": 0}, {"top_k": 0}, {"place_decay": 0.0}, {"lr": -1.0}, {"acceptance_share": 1.5}]
)
def test_settings_that_cannot_work_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        LearningSettings(**wrong)


def test_the_most_frequent_tokens_are_drafted() -> None:
    rollouts = [rollout((9, 9, 9, 8), (5, 5, 5, 3, 3, 7))]
    assert choose_vocabulary(rollouts, 20, 2) == [3, 5]
    assert choose_vocabulary(rollouts, 20, 4) == [3, 5, 7, 9]
    assert choose_vocabulary(rollouts, 20, 7) == [0, 1, 3, 5, 7, 8, 9]
    assert choose_vocabulary(rollouts, 6, 6) == list(range(6))


@given(st.integers(1, 30), st.integers(1, 200), st.integers(0, 5))
def test_every_rollout_is_in_one_step_and_one_pass(count: int, tokens: int, seed: int) -> None:
    rollouts = random_rollouts(count, 10, seed)
    for cut in (steps(rollouts, tokens), list(passes(rollouts, tokens))):
        assert sorted(place for places in cut for place in places) == list(range(count))
        assert all(cut)
    for places in passes(rollouts, tokens):
        longest = max(len(rollouts[place].tokens) for place in places)
        assert len(places) == 1 or len(places) * longest <= tokens
