"""Reasons why a sample is not moved, with the names of the protocol."""

from __future__ import annotations

from enum import Enum

from paceline.internal.v1 import migration_pb2 as pb


class Reason(Enum):
    """Values of `pb.MoveReason`, whose comments explain them."""

    UNKNOWN_SAMPLE = pb.MOVE_REASON_UNKNOWN_SAMPLE
    NOT_DECODING = pb.MOVE_REASON_NOT_DECODING
    REUSING = pb.MOVE_REASON_REUSING
    IN_TRANSIT = pb.MOVE_REASON_IN_TRANSIT
    DONOR_BUSY = pb.MOVE_REASON_DONOR_BUSY
    UNSUPPORTED = pb.MOVE_REASON_UNSUPPORTED
    CLOSED = pb.MOVE_REASON_CLOSED
    VERSION = pb.MOVE_REASON_VERSION
    GEOMETRY = pb.MOVE_REASON_GEOMETRY
    NO_KV = pb.MOVE_REASON_NO_KV
    FULL = pb.MOVE_REASON_FULL
    RECEIVER_BUSY = pb.MOVE_REASON_RECEIVER_BUSY
    INVALID = pb.MOVE_REASON_INVALID
    SELF = pb.MOVE_REASON_SELF
    FINISHED = pb.MOVE_REASON_FINISHED
    ABORTED = pb.MOVE_REASON_ABORTED
    PREEMPTED = pb.MOVE_REASON_PREEMPTED
    OUTGROWN = pb.MOVE_REASON_OUTGROWN
    RECEIVER_LOST = pb.MOVE_REASON_RECEIVER_LOST
    CONNECTION = pb.MOVE_REASON_CONNECTION
    DEADLINE = pb.MOVE_REASON_DEADLINE
    CHECKSUM = pb.MOVE_REASON_CHECKSUM
    WITHDRAWN = pb.MOVE_REASON_WITHDRAWN
    INTERNAL = pb.MOVE_REASON_INTERNAL

    @classmethod
    def of(cls, number: int) -> Reason:
        """Return the reason that a peer sent; INTERNAL if this version does not know it."""
        try:
            return cls(number)
        except ValueError:
            return cls.INTERNAL


class NotMoved(Exception):
    """A sample could not be moved, or a reservation could not be kept."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message

    def __reduce__(self) -> tuple[type[NotMoved], tuple[Reason, str]]:
        # Needed for pickling, when it comes from a worker in another process.
        return type(self), (self.reason, self.message)
