"""What reports say of an instance's speed, and what moves cost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.reallocator.planning.throughput import (
    InstanceReport,
    Speed,
    ThroughputCurve,
    achieved_gain,
    lost_seconds,
    pace,
    settled,
    steady,
    step_seconds,
    tokens_per_second,
)

FIRST = InstanceReport(at=10.0, samples=4, steps=100, tokens=1000)
SECOND = InstanceReport(at=10.5, samples=4, steps=150, tokens=1400)
THIRD = InstanceReport(at=11.5, samples=4, steps=200, tokens=1600)


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


def test_only_work_is_compared_with_work() -> None:
    idle = replace(FIRST, at=9.0, samples=0)
    assert settled([idle, FIRST, SECOND, THIRD]) == [SECOND, THIRD], "it began somewhere before the first"
    assert settled([FIRST, SECOND, THIRD]) == [SECOND, THIRD]
    assert settled([FIRST, SECOND, THIRD], since=10.2) == [SECOND, THIRD]
    resting = [replace(each, samples=0) for each in (SECOND, THIRD)]
    assert settled([FIRST, *resting]) == resting
    assert settled([]) == []
    assert settled([FIRST]) == []


def test_engine_time_that_its_steps_do_not_explain_is_lost() -> None:
    # 100 steps in 1.5 s.
    assert lost_seconds(FIRST, THIRD, 0.01) == pytest.approx(0.5)
    assert lost_seconds(FIRST, THIRD, 0.02) == pytest.approx(-0.5)
    assert lost_seconds(replace(FIRST, samples=0), THIRD, 0.01) is None
    assert lost_seconds(FIRST, THIRD, 0.0) is None


LINEAR = ThroughputCurve(tuple(0.01 + 0.001 * n for n in range(1, 65)))


def speed(donor: float, receiver: float, scale: float = 1.0) -> Speed:
    """As the curve says, times `scale`."""
    together = LINEAR.throughput(int(donor)) + LINEAR.throughput(int(receiver))
    return Speed(together * scale, 0.0, donor, receiver)


def test_a_gain_is_that_over_the_pair_as_it_was() -> None:
    predicted = speed(12, 12).tokens_per_second / speed(20, 4).tokens_per_second - 1
    assert predicted > 0.05
    # The machine is half as fast as the curve says, before and after.
    assert achieved_gain(speed(20, 4, 0.5), speed(12, 12, 0.5), 8, LINEAR) == pytest.approx(predicted)
    # It got slower by the moves.
    assert achieved_gain(speed(20, 4), speed(12, 12, 0.5), 8, LINEAR) == pytest.approx(
        0.5 * (1 + predicted) - 1
    )


def test_samples_that_end_meanwhile_are_no_loss() -> None:
    found = achieved_gain(speed(20, 4), speed(6, 6), 8, LINEAR)
    # Four of the moved ones are left: without them it would be 10 and 2.
    assert found == pytest.approx(speed(6, 6).tokens_per_second / speed(10, 2).tokens_per_second - 1)
    assert achieved_gain(speed(20, 4), speed(0, 0), 8, LINEAR) is None
