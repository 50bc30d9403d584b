"""What the learner's benchmark makes of a recorded run."""

from __future__ import annotations

from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest

from bench.following import (
    ASYNC_3,
    FROZEN,
    NO_REWARD,
    REWARD,
    Amounts,
    FollowerRecord,
    RecordedRollouts,
    _learn,
)
from bench.learner import gain, hidden_share
from bench.learner_picture import smooth
from services.drafter.learning.data import TrainingSample


def recorded(step: int, samples: int = 6, window: float = 1.0) -> RecordedRollouts:
    rollouts = tuple(
        TrainingSample("run", str(step), "p", slot, step, (1,), (2, 3, 4), slot / samples)
        for slot in range(samples)
    )
    return RecordedRollouts(step, Path(f"v{step}"), rollouts, window)


class Notes:
    """A learner that notes what it is given."""

    def __init__(self) -> None:
        self.policy = -1
        self.given: list[tuple[int, TrainingSample, float]] = []

    def set_policy(self, path: Path, version: int) -> None:
        assert path == Path(f"v{version}")
        self.policy = version

    def update(self, rollouts: list[TrainingSample], weights: list[float]) -> SimpleNamespace:
        self.given += [
            (self.policy, rollout, weight) for rollout, weight in zip(rollouts, weights, strict=True)
        ]
        return SimpleNamespace(seconds=0.5, tokens=2 * len(rollouts))


def test_each_sample_is_learned_by_the_policy_that_sampled_it() -> None:
    notes, found = Notes(), FollowerRecord()
    steps = [recorded(step) for step in range(3)]
    seconds = _learn(notes, ASYNC_3, steps, Amounts(learned=32), Random(0), found)
    assert all(policy == rollout.policy_version for policy, rollout, _ in notes.given)
    assert len(notes.given) == 6, "a third of three steps' samples"
    assert seconds == 0.5 * len({policy for policy, _, _ in notes.given})
    assert found.tokens == 12


def test_an_interval_learns_when_it_is_full() -> None:
    steps = [recorded(step) for step in range(7)]
    due = [
        bool(_learn(Notes(), ASYNC_3, steps[:count], Amounts(), Random(0), FollowerRecord()))
        for count in range(8)
    ]
    assert due == [False, False, False, True, False, False, True, False]


def test_rewards_weigh_where_they_are_to() -> None:
    by_reward, plain, frozen = Notes(), Notes(), Notes()
    for notes, follower in ((by_reward, REWARD), (plain, NO_REWARD), (frozen, FROZEN)):
        _learn(notes, follower, [recorded(0)], Amounts(learned=4), Random(0), FollowerRecord())
    assert {weight for _, _, weight in plain.given} == {1.0}
    ordered = sorted(by_reward.given, key=lambda each: each[1].reward or 0)
    assert [weight for _, _, weight in ordered] == sorted(weight for _, _, weight in ordered)
    assert len(ordered) == 4
    assert ordered[0][2] < ordered[-1][2]
    assert not frozen.given


def test_an_update_is_hidden_as_far_as_its_window_reaches() -> None:
    steps = [recorded(step, window=2.0) for step in range(3)]
    assert hidden_share(FollowerRecord(update_seconds=[0.0, 0.0, 1.0]), steps) == 1.0
    assert hidden_share(FollowerRecord(update_seconds=[0.0, 0.0, 8.0]), steps) == 0.25
    assert hidden_share(FollowerRecord(update_seconds=[0.0, 0.0, 0.0]), steps) is None


def test_the_gain_is_that_of_the_last_steps() -> None:
    frozen, better = FollowerRecord([3.0] * 5 + [2.0] * 10), FollowerRecord([1.0] * 5 + [2.5] * 10)
    assert gain(better, frozen) == pytest.approx(0.25)


def test_lines_are_means_in_their_middle() -> None:
    where, values = smooth([1.0, 2.0, 3.0, 4.0], 3)
    assert (where.tolist(), values.tolist()) == ([1.0, 2.0], pytest.approx([2.0, 3.0]))
    assert smooth([1.0], 3)[1].tolist() == [1.0]
