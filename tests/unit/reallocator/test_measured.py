"""What reports say of an instance's speed, and what moves cost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.reallocator.measured import (
    MoveCost,
    Report,
    pace,
    steady,
    step_seconds,
    tokens_per_second,
)

FIRST = Report(at=10.0, samples=4, steps=100, tokens=1000)
SECOND = Report(at=10.5, samples=4, steps=150, tokens=1400)
THIRD = Report(at=11.5, samples=4, steps=200, tokens=1600)


def test_the_pace_is_of_steps_samples_and_tokens() -> None:
    found = pace(FIRST, SECOND)
    assert found is not None
    assert (found.samples, found.steps, found.step_seconds) == (4, 50, 0.01)
    assert found.tokens_per_step == pytest.approx(2.0)


def test_only_the_last_reports_with_as_many_samples_are_steady() -> None:
    before = replace(FIRST, at=9.0, samples=5, steps=0)
    found = steady([before, FIRST, SECOND, THIRD])
    assert found == pace(FIRST, THIRD)
    assert steady([before, FIRST, SECOND, THIRD], since=10.5) == pace(SECOND, THIRD)
    assert steady([FIRST, SECOND, replace(THIRD, samples=3)]) is None
    assert steady([]) is None
    assert steady([FIRST]) is None


def test_engine_steps_need_no_steady_samples() -> None:
    assert step_seconds(FIRST, replace(THIRD, samples=1)) == pytest.approx(0.015)
    assert step_seconds(FIRST, FIRST) == 0.0


@pytest.mark.parametrize(
    "change", [{"samples": 3}, {"steps": 100}, {"tokens": 900}, {"at": 10.0}, {"samples": 0}]
)
def test_nothing_is_told_of_what_was_not_steady(change: dict[str, float]) -> None:
    first = replace(FIRST, samples=0) if change == {"samples": 0} else FIRST
    assert pace(first, replace(SECOND, **change)) is None


def test_tokens_a_second_need_no_steady_samples() -> None:
    assert tokens_per_second(FIRST, replace(SECOND, samples=1)) == pytest.approx(800)
    assert tokens_per_second(SECOND, FIRST) == 0.0


def test_what_moves_cost_is_learned_and_bounded() -> None:
    cost = MoveCost()
    for _ in range(50):
        cost.observe(5.0, 0.1, 100)
    assert cost.stall_steps == pytest.approx(5.0, abs=0.01)
    assert cost.seconds_per_token == pytest.approx(0.001, rel=0.01)
    cost.observe(1e9, -1.0, 0)
    assert cost.stall_steps < 20
    assert cost.seconds_per_token > 0
