"""Delays after failures in a row."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.platform.tasks import ExponentialBackoff


@given(failures=st.integers(1, 10_000))
def test_delays_grow_up_to_the_longest(failures: int) -> None:
    backoff = ExponentialBackoff(0.25, 2.0)
    assert backoff.failed() == 0.25
    backoff.failures = failures
    before = backoff.delay
    assert 0.25 <= before <= backoff.failed() <= 2.0


def test_a_success_starts_over() -> None:
    backoff = ExponentialBackoff(0.5, 10.0)
    assert [backoff.failed() for _ in range(6)] == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0]
    backoff.succeeded()
    assert backoff.delay == 0.0
    assert backoff.failed() == 0.5
