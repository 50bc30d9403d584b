"""What an instance did over a step, and when it did nothing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from examples.tinymath.background import Stretch
from examples.tinymath.lanes import gaps, lane
from examples.tinymath.records import StepRecord, StepTiming, UpdateRecord
from examples.tinymath.spans import SampleSpan

intervals = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 20)).map(lambda pair: (pair[0], pair[0] + pair[1]))
)


@given(intervals, st.integers(1, 50))
def test_gaps_are_the_seconds_that_no_interval_covers(busy: list[tuple[float, float]], end: int) -> None:
    found = gaps(busy, end)
    for second in range(end):
        idle = any(left <= second < right for left, right in found)
        assert idle == (not any(left <= second < right for left, right in busy))
    assert all(0 <= left < right <= end for left, right in found)


def test_a_lane_holds_own_samples_those_ahead_and_the_bubbles_between() -> None:
    record = StepRecord(
        step=0,
        policy_version=0,
        began=0.0,
        learned=UpdateRecord(0.0, 0.0, 0.0, 0.0),
        timing=StepTiming(4.0, 2.0, 1.0),
        lengths=(1,),
        truncated=0,
        instances=("a", "b"),
        spans=(SampleSpan("a", 0.0, 1.0), SampleSpan("a", 0.0, 2.0), SampleSpan("b", 0.0, 4.0)),
        drafted=0,
        accepted=0,
        verify_steps=0,
        decode_steps=0,
        cached=0,
        reused=0,
        migrations=0,
        resubmissions=0,
        background=(Stretch("a", 2.5, 6.0, 3),),
    )
    first, second = lane(record, "a"), lane(record, "b")
    assert first.own == ([0.0, 1.0, 2.0], [2, 1, 0])
    assert first.background == ([2.5, 6.0], [3, 0])
    assert first.idle == [(2.0, 2.5), (6.0, 7.0)]
    assert first.peak == 3
    assert second.background == ([], [])
    assert second.idle == [(4.0, 7.0)], "the update is a bubble too"
