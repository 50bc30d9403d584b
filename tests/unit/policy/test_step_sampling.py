"""Which steps are measured: enough of them, and none of those that say nothing new."""

from __future__ import annotations

from itertools import groupby, pairwise

from hypothesis import given
from hypothesis import strategies as st

from services.generation.speculation.step_sampling import StepSampling

FIRST, BETWEEN = 64, 0.01
steps = st.lists(st.tuples(st.floats(1e-4, 5e-2), st.booleans()), max_size=60)


def settled() -> StepSampling:
    timing = StepSampling()
    for _ in range(FIRST):
        assert timing.should_measure(1e-3, drafted=True)
    return timing


def test_short_steps_of_a_kind_are_measured_once_in_a_while() -> None:
    timing = settled()
    found = [timing.should_measure(2.5e-3, drafted=True) for _ in range(12)]
    assert found == [False, False, False, True] * 3


@given(steps)
def test_no_time_passes_unmeasured_but_in_the_first_step_of_a_run(done: list[tuple[float, bool]]) -> None:
    timing, kinds, passed, left_out = settled(), [True] * FIRST, 0.0, False
    for seconds, drafted in done:
        passed += seconds
        due = timing.should_measure(seconds, drafted=drafted)
        kinds.append(drafted)
        runs = [(kind, len(list(run))) for kind, run in groupby(kinds)]
        run = runs[-1][1]
        if run == 1:
            # After a run of several the first one takes longer; after one alone it is as they are, and so is one
            # whose last run was no longer.
            assert due == (runs[-2][1] == 1 or runs[-3:-2] == [(drafted, 1)])
        elif passed >= BETWEEN or (run == 2 and left_out):
            assert due
        left_out = not due
        if due:
            passed = 0.0


def test_a_trial_of_two_steps_is_measured_in_its_second() -> None:
    timing = settled()
    assert [timing.should_measure(1e-3, drafted=drafted) for drafted in (False, False, True, True)] == [
        False,
        True,
        False,
        True,
    ]


def test_single_steps_between_long_rests_are_measured_but_the_first() -> None:
    timing, found = settled(), []
    for _ in range(3):
        for _ in range(32):
            timing.record_unmeasured(drafted=False)
        found.append(timing.should_measure(1e-3, drafted=True))
    assert found == [False, True, True]


def test_steps_that_nobody_measures_count_as_plain_ones() -> None:
    timing = settled()
    for _ in range(3):
        timing.record_unmeasured(drafted=False)
    assert not timing.should_measure(1.0, drafted=True)
    assert timing.should_measure(1e-3, drafted=True)


@given(st.lists(st.booleans(), max_size=20))
def test_a_step_of_which_nobody_knows_how_long_it_takes_is_measured(kinds: list[bool]) -> None:
    timing = settled()
    for before, drafted in pairwise([True, *kinds]):
        if drafted == before:
            assert timing.should_measure(0.0, drafted=drafted)
        else:
            timing.should_measure(0.0, drafted=drafted)
