"""Calls to a peer after failures."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.drafts.client import CircuitBreaker


def test_a_peer_that_never_failed_is_always_called() -> None:
    breaker = CircuitBreaker()
    assert breaker.closed
    assert all(breaker.admit(now) for now in (0.0, 0.0, 5.0))


def test_after_a_failure_it_is_left_alone_for_the_pause() -> None:
    breaker = CircuitBreaker(first=0.5)
    breaker.failed(began=9.0, now=10.0)
    assert not breaker.admit(10.0)
    assert not breaker.admit(10.49)
    assert not breaker.ready(10.49)
    assert breaker.ready(10.5)
    assert breaker.admit(10.5)


def test_one_call_at_a_time_tries_it_out() -> None:
    breaker = CircuitBreaker(first=0.5)
    breaker.failed(began=0.0, now=0.0)
    assert breaker.admit(0.6)
    assert not breaker.admit(0.7)
    breaker.succeeded(began=0.6)
    assert breaker.closed
    assert breaker.admit(0.7)


def test_the_pause_doubles_up_to_the_longest() -> None:
    breaker = CircuitBreaker(first=0.5, longest=10.0)
    now, pauses = 0.0, []
    for _ in range(7):
        assert breaker.admit(now)
        breaker.failed(began=now, now=now)
        begin = now
        while not breaker.ready(now):
            now += 0.125
        pauses.append(now - begin)
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


def test_a_success_makes_the_next_pause_short_again() -> None:
    breaker = CircuitBreaker(first=0.5)
    for now in (0.0, 1.0, 4.0):
        assert breaker.admit(now)
        breaker.failed(began=now, now=now)
    assert breaker.admit(20.0)
    breaker.succeeded(began=20.0)
    breaker.failed(began=21.0, now=21.0)
    assert breaker.ready(21.5)


def test_calls_that_fail_together_count_once() -> None:
    breaker = CircuitBreaker(first=0.5)
    for _ in range(20):
        breaker.failed(began=1.0, now=2.0)
    assert breaker.ready(2.5)


def test_what_was_under_way_when_it_opened_does_not_close_it() -> None:
    breaker = CircuitBreaker(first=0.5)
    breaker.failed(began=1.0, now=2.0)
    breaker.succeeded(began=1.5)
    assert not breaker.closed


def test_a_trial_that_nobody_reports_on_is_followed_by_another() -> None:
    breaker = CircuitBreaker(first=0.5)
    breaker.failed(began=0.0, now=0.0)
    assert breaker.admit(0.5)
    assert not breaker.admit(0.9)
    assert breaker.admit(1.0)


@given(st.lists(st.tuples(st.floats(0, 30), st.sampled_from(["ok", "failed", "lost"])), max_size=40))
def test_it_is_never_left_alone_for_longer_than_the_longest_pause(calls: list[tuple[float, str]]) -> None:
    breaker, now = CircuitBreaker(first=0.5, longest=10.0), 0.0
    for wait, outcome in calls:
        now += wait
        admitted = breaker.admit(now)
        assert admitted or wait < 10.0
        if admitted and outcome == "ok":
            breaker.succeeded(now)
        elif admitted and outcome == "failed":
            breaker.failed(now, now)
