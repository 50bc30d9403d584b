"""Translate between seconds as floats and the protocol's Duration and Timestamp."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

_NANOS = 10**9


def duration(seconds: float) -> Duration:
    """Return a number of seconds, which may be negative, as a Duration."""
    message = Duration()
    message.FromNanoseconds(round(seconds * _NANOS))
    return message


def timestamp(seconds: float) -> Timestamp:
    """Return seconds since the Unix epoch as a Timestamp; microseconds are kept."""
    whole, micros = divmod(round(seconds * 10**6), 10**6)
    return Timestamp(seconds=whole, nanos=micros * 1000)


def seconds_of(message: Duration | Timestamp) -> float:
    """Return the seconds of a Duration, or since the Unix epoch of a Timestamp; 0 for an unset field."""
    return message.seconds + message.nanos / _NANOS
