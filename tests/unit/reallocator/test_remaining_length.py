"""How long samples go on, from who is still there."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from services.reallocator.planning.learned_costs import RemainingLengthEstimator


def watched(
    length_of: Callable[[random.Random], int], samples: int = 400, step: int = 16
) -> RemainingLengthEstimator:
    """After watching samples of such lengths, looked at every so many tokens, sixteen at a time."""
    chosen, remaining_lengths, number = random.Random(3), RemainingLengthEstimator(), 0
    alive: dict[str, tuple[int, int]] = {}
    while number < samples:
        while len(alive) < 16:
            alive[f"s{number}"] = (0, length_of(chosen))
            number += 1
        remaining_lengths.learn("i0", {key: at for key, (at, _) in alive.items()})
        alive = {key: (at + step, length) for key, (at, length) in alive.items() if at + step < length}
    return remaining_lengths


def test_a_place_that_is_gone_is_forgotten() -> None:
    estimator = RemainingLengthEstimator()
    tracemalloc.start()
    try:
        for number in range(200):
            estimator.learn(f"i{number}", {f"s{sample}": 10_000 + sample for sample in range(200)})
            estimator.forget(f"i{number}")
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 1 << 17
    estimator.forget("never seen")


@pytest.mark.parametrize("generated", [20, 100, 1000])
def test_before_anything_is_known_the_rest_is_as_long_as_what_there_is(generated: int) -> None:
    assert RemainingLengthEstimator().remaining(generated, 100_000) == pytest.approx(generated, rel=0.3)


def test_the_limit_ends_a_sample_that_would_go_on() -> None:
    assert RemainingLengthEstimator().remaining(900, 1000) == pytest.approx(95, abs=6)
    assert RemainingLengthEstimator().remaining(1000, 1000) == 1
    assert RemainingLengthEstimator().remaining(0, 1) == 1


def test_samples_that_all_run_to_their_limit_are_known_to() -> None:
    remaining_lengths = watched(lambda _: 400)
    assert remaining_lengths.remaining(40, 400) > 330


def test_short_ones_are_known_to_be_about_to_end() -> None:
    remaining_lengths = watched(lambda chosen: 30 + chosen.randrange(60))
    assert remaining_lengths.remaining(60, 800) < 30 < RemainingLengthEstimator().remaining(60, 800)


def test_a_constant_chance_to_end_gives_a_constant_rest() -> None:
    remaining_lengths = watched(lambda chosen: 1 + int(chosen.expovariate(1 / 100)), samples=3000)
    for generated in (20, 100, 200):
        assert remaining_lengths.remaining(generated, 100_000) == pytest.approx(100, rel=0.35)


def test_one_that_was_moved_away_has_not_ended() -> None:
    stayed, ended = RemainingLengthEstimator(), RemainingLengthEstimator()
    for remaining_lengths, left in ((stayed, {"b"}), (ended, set())):
        for _ in range(20):
            remaining_lengths.learn("i0", {"a": 50, "b": 50})
            remaining_lengths.learn("i0", {"a": 60}, left)
    assert ended.remaining(50, 1000) < stayed.remaining(50, 1000)


def test_policies_change_and_so_does_what_is_known() -> None:
    remaining_lengths = watched(lambda _: 60, samples=2000)
    short = remaining_lengths.remaining(50, 2000)
    for number in range(300):
        remaining_lengths.learn("i0", {f"n{number}": 40})
        remaining_lengths.learn("i0", {f"n{number}": 90})
    assert remaining_lengths.remaining(50, 2000) > 2 * short


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.dictionaries(st.integers(0, 9), st.integers(0, 5000), max_size=8), max_size=20),
    st.integers(0, 5000),
    st.integers(1, 5000),
)
def test_the_rest_is_always_between_one_and_what_the_limit_leaves(
    seen: list[dict[int, int]], generated: int, more: int
) -> None:
    remaining_lengths = RemainingLengthEstimator()
    for each in seen:
        remaining_lengths.learn("i0", dict(each))
    assert 1 <= remaining_lengths.remaining(generated, generated + more) <= max(1, more)
    longer = remaining_lengths.remaining(generated, generated + 2 * more)
    assert longer >= remaining_lengths.remaining(generated, generated + more) - 1e-9
