"""Durations and timestamps keep floats to the nanosecond and to the microsecond."""

import pytest
from google.protobuf.duration_pb2 import Duration

from paceline.times import duration, seconds_of, timestamp


@pytest.mark.parametrize("seconds", [0.0, 0.1, 1.5, 86_400.25, -0.1, -2.75])
def test_a_duration_comes_back_as_it_was(seconds: float) -> None:
    assert seconds_of(duration(seconds)) == seconds
    assert duration(seconds).ToTimedelta().total_seconds() == seconds


def test_a_timestamp_comes_back_to_the_microsecond() -> None:
    assert seconds_of(timestamp(1_700_000_000.25)) == 1_700_000_000.25
    assert timestamp(1.0000006).nanos == 1000


def test_an_unset_field_is_zero() -> None:
    assert seconds_of(Duration()) == 0.0
