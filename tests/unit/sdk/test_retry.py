"""Delays between attempts."""

import grpc
import pytest
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2

from paceline.calls.caller import Backoff, RetryPolicy
from paceline.errors import InternalError, PacelineError, ResourceExhaustedError, UnavailableError

UNAVAILABLE = UnavailableError(grpc.StatusCode.UNAVAILABLE, "gone")


def asks(seconds: int) -> error_details_pb2.RetryInfo:
    return error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=seconds))


def delays(policy: RetryPolicy, error: PacelineError, most: int = 100) -> list[float]:
    """Return the delays of a call that always fails, each of which has passed before the next is requested."""
    now, found = 100.0, []
    backoff = Backoff(policy, clock=lambda: now)
    while len(found) < most and (delay := backoff.delay_after(error)) is not None:
        found.append(delay)
        now += delay
    return found


def test_delays_double_up_to_the_maximum_until_the_time_is_over() -> None:
    assert delays(RetryPolicy(seconds=10, initial=1, maximum=3, jitter=0), UNAVAILABLE) == [1, 2, 3, 3]
    assert delays(RetryPolicy(seconds=0), UNAVAILABLE) == []


def test_thousands_of_failures_are_no_overflow() -> None:
    assert delays(RetryPolicy(seconds=1e9, maximum=1, jitter=0), UNAVAILABLE, 3000)[-1] == 1


def test_progress_starts_over() -> None:
    backoff = Backoff(RetryPolicy(initial=1, jitter=0))
    assert [backoff.delay_after(UNAVAILABLE) for _ in range(2)] == [1, 2]
    backoff.failures = 0
    assert backoff.delay_after(UNAVAILABLE) == 1


@pytest.mark.parametrize(("draw", "delay"), [(0.0, 0.8), (0.5, 1.0), (1.0, 1.2)])
def test_jitter_spreads_the_delay(draw: float, delay: float) -> None:
    backoff = Backoff(RetryPolicy(initial=1, jitter=0.2), draw=lambda: draw)
    assert backoff.delay_after(UNAVAILABLE) == pytest.approx(delay)


def test_the_service_may_ask_for_more_time() -> None:
    error = UnavailableError(grpc.StatusCode.UNAVAILABLE, "gone", [asks(9)])
    assert delays(RetryPolicy(seconds=20), error) == [9, 9]
    assert delays(RetryPolicy(seconds=8), error) == [], "it is not asked before its time"


def test_a_full_service_that_names_a_time_is_tried_again() -> None:
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    assert delays(RetryPolicy(seconds=11), ResourceExhaustedError(code, "full", [asks(5)])) == [5, 5]
    assert delays(RetryPolicy(), ResourceExhaustedError(code, "too large")) == []


def test_other_errors_are_final() -> None:
    assert delays(RetryPolicy(), InternalError(grpc.StatusCode.INTERNAL, "broken", [asks(1)])) == []


def test_a_wrong_address_is_tried_for_seconds_and_one_that_changes_for_longer() -> None:
    now = 0.0
    backoff = Backoff(RetryPolicy(initial=1, maximum=1, jitter=0), clock=lambda: now)
    for wrong in (True, True, True, False, True, True, True, True, True):
        delay = backoff.delay_after(UNAVAILABLE, wrong)
        assert delay == 1
        now += delay
    assert backoff.delay_after(UNAVAILABLE, True) is None
