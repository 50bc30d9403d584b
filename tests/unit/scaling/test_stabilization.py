"""A recommendation is followed once it has been made for a while."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from services.policy.config import ScalingConfig
from services.policy.scaling.recommendation import Stabilizer

CONFIG = ScalingConfig(up_seconds=10, down_seconds=60, cooldown_seconds=30, tolerance=0.1)


def follow(recommended: list[int], current: int = 5, every: float = 5.0) -> list[int]:
    """Return the replicas at each observation."""
    stabilizer, seen = Stabilizer(CONFIG), []
    for turn, value in enumerate(recommended):
        current = stabilizer.update(current, value, turn * every)
        seen.append(current)
    return seen


def test_more_are_taken_after_a_short_while() -> None:
    assert follow([8] * 4) == [5, 5, 8, 8]


def test_as_few_as_at_any_moment_of_that_while() -> None:
    assert follow([5, 9, 8, 9]) == [5, 5, 5, 8]
    assert follow([5, 9, 5, 9, 5, 9]) == [5] * 6


def test_fewer_after_a_longer_one() -> None:
    seen = follow([2] * 14)
    assert seen == [5] * 12 + [2, 2]


def test_a_moment_of_need_starts_that_while_anew() -> None:
    assert follow([2] * 6 + [5] + [2] * 11) == [5] * 18
    assert follow([2] * 6 + [5] + [2] * 14)[-1] == 2


def test_after_a_change_there_is_a_pause() -> None:
    assert follow([8] * 3 + [10] * 10)[3:10] == [8] * 6 + [10]


def test_a_change_by_somebody_else_starts_the_pause_too() -> None:
    stabilizer = Stabilizer(CONFIG)
    for turn in range(10):
        stabilizer.update(5, 8, turn)
    assert stabilizer.update(6, 8, 10.0) == 6
    assert stabilizer.update(6, 8, 39.0) == 6
    assert stabilizer.update(6, 8, 40.0) == 8


def one_at_a_time(recommended: list[int], current: int) -> list[tuple[int, int]]:
    """Return the present and the wanted replicas at each observation, where at most one goes at each."""
    stabilizer, seen = Stabilizer(CONFIG), []
    for turn, value in enumerate(recommended):
        wanted = stabilizer.update(current, value, turn * 5.0)
        seen.append((current, wanted))
        current = max(wanted, current - 1)
    return seen


def test_replicas_that_go_one_by_one_are_one_change() -> None:
    seen = one_at_a_time([2] * 17, current=6)
    assert [wanted for _, wanted in seen] == [6] * 12 + [2] * 5
    assert seen[-1] == (2, 2)


def test_a_change_is_broken_off_when_the_need_is_back() -> None:
    seen = one_at_a_time([2] * 14 + [9] * 8, current=6)
    assert seen[13] == (5, 2)
    assert seen[14] == (4, 4), "kept at once"
    assert {wanted for _, wanted in seen[14:20]} == {4}, "and then there is the pause"
    assert seen[20] == (4, 9)


def test_somebody_who_turns_it_back_is_heeded() -> None:
    stabilizer = Stabilizer(CONFIG)
    for turn in range(13):
        wanted = stabilizer.update(5, 2, turn * 5.0)
    assert wanted == 2
    assert stabilizer.update(4, 2, 65.0) == 2
    assert stabilizer.update(7, 2, 70.0) == 7
    assert stabilizer.update(7, 2, 99.0) == 7
    assert stabilizer.update(7, 2, 100.0) == 2


def test_small_changes_are_passed_over() -> None:
    assert follow([109] * 4, current=100) == [100] * 4
    assert follow([110] * 4, current=100)[-1] == 110


@given(st.lists(st.integers(0, 20), min_size=1, max_size=60), st.integers(1, 20))
def test_it_never_turns_around_quickly(recommended: list[int], current: int) -> None:
    seen = [current, *follow(recommended, current)]
    changes = [turn for turn in range(1, len(seen)) if seen[turn] != seen[turn - 1]]
    for turn in changes:
        now, was = seen[turn], seen[turn - 1]
        window = (
            recommended[max(0, turn - 1 - 2) : turn] if now > was else recommended[max(0, turn - 13) : turn]
        )
        assert all(value >= now for value in window) if now > was else all(value <= now for value in window)
    assert all(later - earlier >= 6 for earlier, later in pairwise(changes))


@given(st.integers(0, 20), st.integers(1, 20))
def test_a_constant_recommendation_is_reached_and_kept(recommended: int, current: int) -> None:
    seen = follow([recommended] * 60, current)
    small = abs(recommended - current) < CONFIG.tolerance * current
    assert seen[-1] == (current if small else recommended)
    assert len(set(seen)) <= 2
