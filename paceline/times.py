"""Seconds: of the protocol's Duration and Timestamp as floats, and the parts of a sample's time."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

STEP_PARTS = ("queue", "prefill", "plain", "verified", "moves", "between")
"""Parts of a sample's time, in this order: until its first engine step; the step with the first token; steps
without and with a verified draft; moves and restarts; between engine steps, and until its end was reported."""
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
