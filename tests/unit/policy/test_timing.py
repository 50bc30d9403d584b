"""Which steps are measured: enough of them, and none of those that say nothing new."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.policy.timing import Timing

FIRST, BETWEEN = 64, 0.01
steps = st.lists(st.tuples(st.floats(1e-4, 5e-2), st.booleans()), max_size=60)


def settled() -> Timing:
    timing = Timing()
    for _ in range(FIRST):
        assert timing.due(1e-3, drafted=True)
    return timing


def test_short_steps_of_a_kind_are_measured_once_in_a_while() -> None:
    timing = settled()
    found = [timing.due(2.5e-3, drafted=True) for _ in range(12)]
    assert found == [False, False, False, True] * 3


@given(steps)
def test_no_time_passes_unmeasured_and_no_other_kind_of_step(done: list[tuple[float, bool]]) -> None:
    timing, before, passed = settled(), True, 0.0
    for seconds, drafted in done:
        passed += seconds
        due = timing.due(seconds, drafted=drafted)
        assert due == (drafted != before or passed >= BETWEEN)
        if due:
            before, passed = drafted, 0.0


@given(st.lists(st.booleans(), max_size=20))
def test_a_step_of_which_nobody_knows_how_long_it_takes_is_measured(kinds: list[bool]) -> None:
    timing = settled()
    assert all(timing.due(0.0, drafted=drafted) for drafted in kinds)
