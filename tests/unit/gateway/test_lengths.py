"""Predicted lengths: the prompt's own history, else the trainer's guess, else the run's mean."""

from __future__ import annotations

import tracemalloc

import hypothesis.strategies as st
from hypothesis import given

from services.gateway.scheduler.estimator import UNKNOWN_LENGTH, WINDOW, LengthPredictor


def test_what_is_known_best_counts_first() -> None:
    predictor = LengthPredictor()
    assert predictor.predict("r", "p") == UNKNOWN_LENGTH
    assert predictor.predict("r", "p", expected=70) == 70
    predictor.observe("r", "other", 100)
    predictor.observe("r", "other", 300)
    assert predictor.predict("r", "p") == 200
    assert predictor.predict("r", "p", expected=70) == 70
    predictor.observe("r", "p", 40)
    assert predictor.predict("r", "p", expected=70) == 40
    assert predictor.predict("another run", "p") == UNKNOWN_LENGTH


def test_a_prompt_counts_as_long_as_its_long_responses() -> None:
    predictor = LengthPredictor()
    for length in (10, 10, 10, 10, 900, 900):
        predictor.observe("r", "p", length)
    assert predictor.predict("r", "p") == 900


def test_the_limit_bounds_the_prediction() -> None:
    assert LengthPredictor().predict("r", "p", expected=70, limit=20) == 20


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=3 * WINDOW))
def test_a_prediction_is_one_of_the_recent_lengths(observed: list[int]) -> None:
    predictor = LengthPredictor()
    for length in observed:
        predictor.observe("r", "p", length)
    recent = observed[-WINDOW:]
    predicted = predictor.predict("r", "p")
    assert predicted in {max(1, length) for length in recent}
    assert sum(length <= predicted for length in recent) > 0.8 * len(recent) - 1


def test_runs_not_seen_for_longest_are_forgotten() -> None:
    predictor = LengthPredictor(max_runs=2)
    for run in ("a", "b", "a", "c"):
        predictor.observe(run, "p", 10)
    assert [predictor.predict(run, "another") for run in "abc"] == [10, UNKNOWN_LENGTH, 10]


def test_a_prompt_takes_little_memory() -> None:
    """Half of what is documented is left for the names, which callers choose."""
    prompts, predictor = 500, LengthPredictor()
    tracemalloc.start()
    try:
        for number in range(WINDOW * prompts):
            # Distinct integers: each would take memory of its own.
            predictor.observe("r", f"p{number % prompts}", 1000 + number)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held / prompts < 640


def test_prompts_not_seen_for_longest_are_forgotten() -> None:
    predictor = LengthPredictor(max_prompts=2)
    for prompt in ("a", "b", "a", "c"):
        predictor.observe("r", prompt, 10)
    assert predictor.predict("r", "a", expected=5) == 10
    assert predictor.predict("r", "b", expected=5) == 5
