"""What an exception out of a stage of a move means to the donor."""

from __future__ import annotations

import grpc
import structlog

from services.generation.migration.donor import Event
from services.generation.migration.reason import NotMoved, Reason
from services.platform.errors import Unavailable

_log = structlog.get_logger(__name__)


class Refused(NotMoved):
    """The receiver has said that it does not have the sample, and will not."""


def event_of(error: BaseException) -> tuple[Event, Reason, str]:
    """The event, its reason and a message. What is no failure of a move, such as a cancellation, is raised."""
    match error:
        case Refused():
            return Event.REFUSED, error.reason, error.message
        case NotMoved():
            event = Event.LEFT if error.reason is Reason.FINISHED else Event.FAILED
            return event, error.reason, error.message
        case Unavailable():
            return Event.LEFT, Reason.ABORTED, "the donor's engine has stopped"
        case grpc.aio.AioRpcError():
            late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            reason = Reason.DEADLINE if late else Reason.RECEIVER_LOST
            return Event.FAILED, reason, f"{error.code().name}: {error.details()}"
        case TimeoutError():
            return Event.FAILED, Reason.DEADLINE, str(error)
        case Exception():
            _log.error("move_failed", exc_info=error)
            return Event.FAILED, Reason.INTERNAL, repr(error)
    raise error
