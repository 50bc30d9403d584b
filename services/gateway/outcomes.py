"""What came of telling an instance to do something with weights: done, or why not."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from paceline.v1 import weight_pb2
from services.gateway.roster import Connection, ConnectionBroken, within
from services.platform.errors import ServiceError
from services.platform.interceptor import STATUS_DETAILS

# Codes by which an instance says that it is not well, rather than that the weights are not.
UNWELL = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.ABORTED,
    }
)
_DETAILS: tuple[type[Message], ...] = (
    error_details_pb2.BadRequest,
    error_details_pb2.PreconditionFailure,
    error_details_pb2.QuotaFailure,
    error_details_pb2.ResourceInfo,
    error_details_pb2.ErrorInfo,
    error_details_pb2.RetryInfo,
)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an instance did not do what it was told."""

    code: grpc.StatusCode
    message: str
    details: tuple[Message, ...] = ()


# The instance, what it did, and the failure if there was one.
Outcome = tuple[Connection, weight_pb2.InstanceUpdate, Failure | None]


async def attempt(
    connection: Connection, do: Callable[[Connection], Awaitable[weight_pb2.InstanceUpdate]]
) -> Outcome:
    """Lets one instance do it; a failure, or the loss of the instance, is an outcome too."""
    try:
        return connection, await within(connection, do(connection)), None
    except grpc.aio.AioRpcError as error:
        failure = Failure(error.code(), error.details() or "", _details(error))
    except ConnectionBroken as error:
        failure = Failure(grpc.StatusCode.UNAVAILABLE, str(error))
    failed = weight_pb2.InstanceUpdate(
        instance_id=connection.instance_id,
        version=connection.member.version,
        error=f"{failure.code.name}: {failure.message}",
    )
    return connection, failed, failure


def passed_on(instance_id: str, failure: Failure) -> ServiceError:
    """The instance's error as the trainer gets it, details included."""
    return ServiceError(f"{instance_id}: {failure.message}", *failure.details, code=failure.code)


def _details(error: grpc.aio.AioRpcError) -> tuple[Message, ...]:
    for key, value in error.trailing_metadata() or ():
        if key == STATUS_DETAILS and isinstance(value, bytes):
            return tuple(filter(None, map(_unpack, status_pb2.Status.FromString(value).details)))
    return ()


def _unpack(detail: Any) -> Message | None:
    for kind in _DETAILS:
        if detail.Is(kind.DESCRIPTOR):
            message = kind()
            detail.Unpack(message)
            return message
    return None
