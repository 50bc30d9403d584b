"""Delays between attempts."""

import grpc
import pytest
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2

from paceline.errors import InternalError, UnavailableError
from paceline.retry import Backoff, RetryPolicy

UNAVAILABLE = UnavailableError(grpc.StatusCode.UNAVAILABLE, "gone")


def test_delays_double_up_to_the_maximum_and_end() -> None:
    backoff = Backoff(RetryPolicy(attempts=5, initial=1, maximum=3, jitter=0))
    assert [backoff.delay_after(UNAVAILABLE) for _ in range(5)] == [1, 2, 3, 3, None]


def test_progress_starts_over() -> None:
    backoff = Backoff(RetryPolicy(attempts=3, initial=1, jitter=0))
    assert [backoff.delay_after(UNAVAILABLE) for _ in range(2)] == [1, 2]
    backoff.progress()
    assert backoff.delay_after(UNAVAILABLE) == 1


@pytest.mark.parametrize(("draw", "delay"), [(0.0, 0.8), (0.5, 1.0), (1.0, 1.2)])
def test_jitter_spreads_the_delay(draw: float, delay: float) -> None:
    backoff = Backoff(RetryPolicy(initial=1, jitter=0.2), draw=lambda: draw)
    assert backoff.delay_after(UNAVAILABLE) == pytest.approx(delay)


def test_the_service_may_ask_for_more_time() -> None:
    info = error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=9))
    error = UnavailableError(grpc.StatusCode.UNAVAILABLE, "gone", [info])
    assert Backoff(RetryPolicy(initial=1), draw=lambda: 0.0).delay_after(error) == 9


def test_only_unavailable_is_tried_again() -> None:
    error = InternalError(grpc.StatusCode.INTERNAL, "broken")
    assert Backoff(RetryPolicy()).delay_after(error) is None
