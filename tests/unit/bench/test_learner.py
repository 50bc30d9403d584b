"""The learner's benchmark computes figures, replays and tables from a recorded run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest

from bench.learner import replay
from bench.learner.following import (
    ASYNC_1,
    ASYNC_3,
    FROZEN,
    MORE,
    REWARD,
    SYNC,
    Amounts,
    Follower,
    FollowerRecord,
    RecordedRollouts,
    learn,
)
from bench.learner.replay import BLOCKS, NONE, blocks, replayed
from bench.learner.tables import gain, hidden_share, over_seeds, weighting_verdict
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


_AMOUNTS = Amounts()


def followed(
    notes: Notes, follower: Follower, steps: list[RecordedRollouts], amounts: Amounts = _AMOUNTS
) -> FollowerRecord:
    found = FollowerRecord()
    first = [sample for sample in recorded(0).rollouts]
    found.update_seconds.append(learn(notes, follower, steps, first, amounts, Random(0), found))
    return found


def test_each_sample_is_learned_by_the_policy_that_sampled_it() -> None:
    notes = Notes()
    found = followed(notes, ASYNC_3, [recorded(step) for step in range(3)])
    assert all(policy == rollout.policy_version for policy, rollout, _ in notes.given)
    assert len(notes.given) == 6, "a third of three steps' samples"
    assert (found.tokens, found.read) == (12, 24)


def test_more_warm_up_learns_as_much_from_the_first_policy() -> None:
    notes, other = Notes(), Notes()
    steps = [recorded(step) for step in range(3)]
    followed(notes, MORE, steps)
    followed(other, ASYNC_1, steps)
    assert {policy for policy, _, _ in notes.given} == {0}
    assert {policy for policy, _, _ in other.given} == {2}
    assert len(notes.given) == len(other.given)


def test_an_interval_learns_when_it_is_full() -> None:
    steps = [recorded(step) for step in range(7)]
    due = [bool(followed(Notes(), ASYNC_3, steps[:count]).tokens) for count in range(8)]
    assert due == [False, False, False, True, False, False, True, False]


def test_rewards_weigh_where_they_are_to() -> None:
    by_reward, plain, frozen = Notes(), Notes(), Notes()
    for notes, follower in ((by_reward, REWARD), (plain, ASYNC_1), (frozen, FROZEN)):
        followed(notes, follower, [recorded(0)], Amounts(learned=4))
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
    frozen, better = FollowerRecord([3.0] * 10 + [2.0] * 10), FollowerRecord([1.0] * 10 + [2.5] * 10)
    assert gain(better, frozen) == pytest.approx(0.25)
    # Of a short run the second half.
    assert gain(FollowerRecord([9.0, 3.0]), FollowerRecord([1.0, 2.0])) == pytest.approx(0.5)


def test_figures_are_means_over_seeds_with_the_spread_of_the_gain() -> None:
    row = {"last": 2.0, "gain_vs_frozen": 0.1, "by_place": [0.5, 0.3], "hidden_share": None}
    other = {"last": 3.0, "gain_vs_frozen": 0.3, "by_place": [0.7, 0.3], "hidden_share": 1.0}
    found = over_seeds([{"Async-1": row}, {"Async-1": other}])["Async-1"]
    assert (found["last"], found["by_place"], found["hidden_share"]) == (2.5, [0.6, 0.3], None)
    assert found["gain_vs_frozen"] == pytest.approx(0.2)
    assert found["gain_spread"] == pytest.approx(0.2 / 2**0.5)
    assert over_seeds([{"Async-1": row}])["Async-1"]["gain_spread"] is None


def test_weighting_is_shown_by_twice_its_spread() -> None:
    assert weighting_verdict([0.02, 0.03, 0.025])["reward_weighting_shown"] == 1
    assert weighting_verdict([0.02, -0.03, 0.025])["reward_weighting_shown"] == 0
    assert weighting_verdict([0.02])["reward_weighting_shown"] is None


def test_better_drafts_take_less_time_and_waiting_for_an_update_more() -> None:
    poor, good = [[0.4, 0.4]] * 4, [[0.8, 0.8]] * 4
    assert blocks([[0.5], [0.7], [0.9], [0.1]]) == [(0.5,), (0.7,), (pytest.approx(0.5),)]
    assert blocks(good) == [pytest.approx((0.8, 0.8))] * BLOCKS
    runs = {
        name: FollowerRecord(by_place=places)
        for name, places in ((FROZEN.name, poor), (SYNC.name, good), (ASYNC_1.name, good))
    }
    found = replayed(runs, 2, 2, {FROZEN.name: 0.0, SYNC.name: 5.0, ASYNC_1.name: 5.0})
    assert found[ASYNC_1.name].seconds < found[FROZEN.name].seconds < found[NONE].seconds
    assert found[SYNC.name].seconds == pytest.approx(found[ASYNC_1.name].seconds + 5.0)
    assert found[NONE].slow_seconds == found[NONE].seconds
    assert all(found[name].slow_seconds > found[name].seconds for name in runs)
    plain = {
        name: {**asdict(each), "seconds": each.seconds, "slow_seconds": each.slow_seconds}
        for name, each in found.items()
    }
    ratios = replay.against([plain, plain], ASYNC_1.name)
    assert ratios["rollout_time_vs_frozen"] == found[ASYNC_1.name].seconds / found[FROZEN.name].seconds
    assert ratios["rollout_time_vs_none"] == found[ASYNC_1.name].seconds / found[NONE].seconds
    assert ratios["slow_rollout_time_vs_none"] == found[ASYNC_1.name].slow_seconds / found[NONE].seconds
    assert ratios["rollout_time_vs_frozen_spread"] == 0


def test_an_update_that_reaches_as_much_of_a_faster_device_is_as_much_faster() -> None:
    run = FollowerRecord(update_seconds=[0.0, 2.0], tokens=100, read=200)
    share = replay.efficiency(run, 1e6, 1e5, 5, 1e9)
    assert share == pytest.approx((2 * 1e6 * 200 + 6 * 1e5 * 5 * 100) / 2.0 / 1e9)
    assert replay.h100_update_seconds(share / 2, 5) == pytest.approx(2 * replay.h100_update_seconds(share, 5))
