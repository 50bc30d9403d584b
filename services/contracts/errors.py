"""Define the errors that cross a process boundary: a gRPC code, a message, and google.rpc details.

Services raise these; the server turns them into a `google.rpc.Status` in the trailing metadata
`grpc-status-details-bin`, where the SDK finds it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from paceline.errors import Violation

DOMAIN = "paceline"
"""The `domain` of every ErrorInfo."""
# A peer refuses trailing metadata over 8 KiB, which would lose the error. The message is sent twice, by itself and
# in the status; binary values grow by a third if they have to be sent as text.
MAX_MESSAGE = 1024
"""Longest error message, in encoded bytes."""
MAX_DETAILS = 3072
"""Most bytes of details."""
MAX_TEXT = 512
"""Longest description of one violation and longest metadata value, in encoded bytes."""
RESUMING = "RESUMING"
"""Reason of a FailedPrecondition: the model of an instance cannot resume from the tokens that a sample has."""
KEEPING_KV = "keep_kv"
"""Feature of an instance, as `refused_features` names it: samples can keep their KV over an update."""


class ServiceError(Exception):
    """Error that ends an RPC with `code`, `message` and `details` (google.rpc messages)."""

    code = grpc.StatusCode.UNKNOWN

    def __init__(self, message: str, *details: Message, code: grpc.StatusCode | None = None) -> None:
        super().__init__(message)
        self.code = code or type(self).code
        self.message = message
        self.details: list[Message] = list(details)


class InvalidArgument(ServiceError):
    """Raised when fields of the request are invalid, whatever the state of the system."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "INVALID_ARGUMENT"

    def __init__(self, violations: Sequence[Violation]) -> None:
        self.violations = list(violations)
        message = "; ".join(f"{each.field}: {each.description}" for each in self.violations)
        super().__init__(message, _bad_request(self.violations), _info(self.reason))


class FailedPrecondition(ServiceError):
    """Raised when the system is not in the state that the request needs; `reason` is an UPPER_SNAKE constant."""

    code = grpc.StatusCode.FAILED_PRECONDITION

    def __init__(self, reason: str, message: str, **metadata: str) -> None:
        self.reason = reason
        failure = error_details_pb2.PreconditionFailure()
        failure.violations.add(type=reason, subject=DOMAIN, description=_clip(message, MAX_TEXT))
        super().__init__(message, failure, _info(reason, metadata))


class NotFound(ServiceError):
    """Raised when there is no `kind` called `name`."""

    code = grpc.StatusCode.NOT_FOUND

    def __init__(self, kind: str, name: str) -> None:
        message = f"{kind} {name!r} not found"
        super().__init__(message, *_resource("NOT_FOUND", kind, name, message))


class AlreadyExists(ServiceError):
    """Raised when another `kind` is already called `name`; `field` is the first field that differs."""

    code = grpc.StatusCode.ALREADY_EXISTS

    def __init__(self, kind: str, name: str, message: str = "", field: str = "") -> None:
        message = message or f"{kind} {name!r} exists already"
        more = {"field": field} if field else {}
        super().__init__(message, *_resource("ALREADY_EXISTS", kind, name, message, more))


class ResourceExhausted(ServiceError):
    """Raised when `resource` is used up; `retry_after` is in seconds, None if a retry will not help."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED

    def __init__(
        self, resource: str, message: str, retry_after: float | None = None, **metadata: str
    ) -> None:
        self.reason = resource
        failure = error_details_pb2.QuotaFailure()
        failure.violations.add(subject=resource, description=_clip(message, MAX_TEXT))
        info = _info("RESOURCE_EXHAUSTED", {"resource": resource, **metadata})
        super().__init__(message, failure, info, *_retry(retry_after))


class Unavailable(ServiceError):
    """Raised when a request cannot be served now; retry after `retry_after` seconds."""

    code = grpc.StatusCode.UNAVAILABLE

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message, _info("UNAVAILABLE"), *_retry(retry_after))


class Aborted(ServiceError):
    """Raised when the state on which a request is based has changed: read it and try again.

    `reason` is an UPPER_SNAKE constant.
    """

    code = grpc.StatusCode.ABORTED

    def __init__(self, reason: str, message: str, **metadata: str) -> None:
        super().__init__(message, _info(reason, metadata))


class PlainError(ServiceError):
    """Base of errors that need no more than a code: their only detail is an ErrorInfo with its name."""

    def __init__(self, message: str) -> None:
        super().__init__(message, _info(type(self).code.name))


class DataLoss(PlainError):
    """Raised when data is missing or damaged beyond recovery."""

    code = grpc.StatusCode.DATA_LOSS


class Unauthenticated(PlainError):
    """Raised when the caller has no credentials, or invalid ones."""

    code = grpc.StatusCode.UNAUTHENTICATED


class Unimplemented(ServiceError):
    """Raised when `feature` does not exist, or not with this configuration."""

    code = grpc.StatusCode.UNIMPLEMENTED

    def __init__(self, feature: str, message: str) -> None:
        super().__init__(message, _info("UNIMPLEMENTED", {"feature": feature}))


class PermissionDenied(ServiceError):
    """Raised when the caller is known but not permitted; `reason` is an UPPER_SNAKE constant."""

    code = grpc.StatusCode.PERMISSION_DENIED

    def __init__(self, message: str, reason: str = "PERMISSION_DENIED", **metadata: str) -> None:
        self.reason = reason
        super().__init__(message, _info(reason, metadata))


def kv_not_kept(instance_id: str, why: str) -> FailedPrecondition:
    """Return the refusal of an update whose samples would keep their KV, which an instance does not allow.

    Args:
        instance_id: the instance.
        why: its reason, which completes the message.
    """
    return FailedPrecondition(
        "KV_NOT_KEPT",
        f"in_flight: KEEP_KV cannot be used, because instance {instance_id} keeps no KV: {why}. "
        "The weights stay staged: finish the update with in_flight CONTINUE or ABORT",
        instance_id=instance_id,
        in_flight=KEEPING_KV,
        why=why,
    )


def to_status(error: ServiceError) -> status_pb2.Status:
    """Return the google.rpc.Status of `error`, without details that would not fit into a trailer."""
    status = status_pb2.Status(code=error.code.value[0], message=_clip(error.message, MAX_MESSAGE))
    room = MAX_DETAILS
    for detail in error.details:
        size = detail.ByteSize() + len(detail.DESCRIPTOR.full_name) + 32
        if size <= room:
            status.details.add().Pack(detail)
            room -= size
    return status


def _bad_request(violations: Sequence[Violation]) -> error_details_pb2.BadRequest:
    request = error_details_pb2.BadRequest()
    for each in violations:
        request.field_violations.add(
            field=_clip(each.field, MAX_TEXT), description=_clip(each.description, MAX_TEXT)
        )
        if request.ByteSize() > MAX_DETAILS - MAX_TEXT:
            # The others would not fit; the caller can correct these first.
            del request.field_violations[-1]
            break
    return request


def _info(reason: str, metadata: Mapping[str, str] | None = None) -> error_details_pb2.ErrorInfo:
    clipped = {key: _clip(str(value), MAX_TEXT) for key, value in (metadata or {}).items()}
    return error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN, metadata=clipped)


def _resource(
    reason: str, kind: str, name: str, message: str, more: Mapping[str, str] | None = None
) -> tuple[Message, Message]:
    resource = error_details_pb2.ResourceInfo(
        resource_type=kind, resource_name=_clip(name, MAX_TEXT), description=_clip(message, MAX_TEXT)
    )
    return resource, _info(reason, {"kind": kind, "name": name, **(more or {})})


def _retry(seconds: float | None) -> list[Message]:
    if seconds is None:
        return []
    delay = Duration()
    delay.FromMilliseconds(round(seconds * 1000))
    return [error_details_pb2.RetryInfo(retry_delay=delay)]


def _clip(text: str, limit: int) -> str:
    """Return `text` cut to at most `limit` bytes in a gRPC message, where é is "%C3%A9"."""
    clean = text.encode("utf-8", "replace").decode()
    sizes = list(accumulate(_sent_size(character) for character in clean[: limit + 1]))
    if not sizes or sizes[-1] <= limit:
        return clean
    return f"{clean[: bisect_right(sizes, limit - 3)]}..."


def _sent_size(character: str) -> int:
    plain = " " <= character <= "~" and character != "%"
    return 1 if plain else 3 * len(character.encode())
