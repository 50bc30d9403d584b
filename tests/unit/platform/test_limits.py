"""The token bucket."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.platform.security.guard import Bucket, Rate

rates = st.builds(Rate, st.floats(0.1, 1000), st.floats(1, 100))
gaps = st.lists(st.floats(0, 5), max_size=200)


@given(rates, gaps)
def test_no_window_lets_more_through_than_burst_and_rate(rate: Rate, gaps: list[float]) -> None:
    bucket, now, passed = Bucket(rate, 0.0), 0.0, []
    for gap in gaps:
        now += gap
        if bucket.take(now) == 0:
            passed.append(now)
    for first, begin in enumerate(passed):
        for last in range(first, len(passed)):
            most = rate.burst + rate.per_second * (passed[last] - begin)
            assert last - first + 1 <= most + 1e-6


@given(rates, gaps)
def test_who_waits_as_told_is_let_through(rate: Rate, gaps: list[float]) -> None:
    bucket, now = Bucket(rate, 0.0), 0.0
    for gap in gaps:
        now += gap
        if wait := bucket.take(now):
            assert wait <= 1 / rate.per_second + 1e-9
            now += wait + 1e-6
            assert bucket.take(now) == 0


def test_the_burst_is_there_at_once_and_comes_back() -> None:
    bucket = Bucket(Rate(2.0, 3), 10.0)
    assert [bucket.take(10.0) for _ in range(4)] == [0, 0, 0, 0.5]
    assert bucket.take(10.5) == 0
    assert bucket.take(10.5) > 0
    assert [bucket.take(100.0) for _ in range(4)] == [0, 0, 0, 0.5]


def test_a_clock_that_goes_back_gives_nothing_away() -> None:
    bucket = Bucket(Rate(1.0, 1), 10.0)
    assert bucket.take(10.0) == 0
    assert bucket.take(5.0) > 0
    assert bucket.take(10.5) > 0
