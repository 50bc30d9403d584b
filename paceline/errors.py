"""The errors that calls raise: one class for each gRPC code, with the service's details readable.

    try:
        client.submit(batch)
    except paceline.InvalidArgumentError as error:
        for violation in error.violations:
            print(violation.field, violation.description)

`str(error)` says all of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

STATUS_KEY = "grpc-status-details-bin"
REQUEST_ID_KEY = "x-request-id"

_DETAIL_TYPES: dict[str, type[Message]] = {
    kind.DESCRIPTOR.full_name: kind
    for kind in (
        error_details_pb2.BadRequest,
        error_details_pb2.ErrorInfo,
        error_details_pb2.PreconditionFailure,
        error_details_pb2.QuotaFailure,
        error_details_pb2.ResourceInfo,
        error_details_pb2.RetryInfo,
    )
}


@dataclass(frozen=True, slots=True)
class Violation:
    """One thing that was wrong: which field (or subject), and what is allowed."""

    field: str
    description: str


class PacelineError(Exception):
    """A call that the service refused, or that never reached it."""

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        details: Iterable[Message] = (),
        request_id: str | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.details = tuple(details)
        """google.rpc.* messages, those of types known here."""
        self.request_id = request_id
        """Names the call in the service's logs."""

    @property
    def violations(self) -> tuple[Violation, ...]:
        """Field, precondition and quota violations, in the service's order."""
        return tuple(violation for detail in self.details for violation in _violations(detail))

    @property
    def reason(self) -> str:
        """The machine-readable reason, such as `STALE_VERSION`; empty when none was given."""
        return next((d.reason for d in self.details if isinstance(d, error_details_pb2.ErrorInfo)), "")

    @property
    def metadata(self) -> Mapping[str, str]:
        """What goes with the reason: values at fault and values allowed."""
        infos = [d for d in self.details if isinstance(d, error_details_pb2.ErrorInfo)]
        return dict(infos[0].metadata) if infos else {}

    @property
    def retry_after(self) -> float | None:
        """Seconds after which the service wants to be asked again; None when it did not say."""
        infos = [d for d in self.details if isinstance(d, error_details_pb2.RetryInfo)]
        return infos[0].retry_delay.ToTimedelta().total_seconds() if infos else None

    def __str__(self) -> str:
        """Code, message, then one line for each violation and for the reason."""
        lines = [f"{self.code.name}: {self.message}"]
        lines += [f"  {violation.field}: {violation.description}" for violation in self.violations]
        if self.reason:
            pairs = ", ".join(f"{key}={value}" for key, value in sorted(self.metadata.items()))
            lines.append(f"  reason {self.reason}" + (f" ({pairs})" if pairs else ""))
        if self.request_id:
            lines.append(f"  request {self.request_id}")
        return "\n".join(lines)


class InvalidArgumentError(PacelineError):
    """Bad input; `violations` names the fields."""


class FailedPreconditionError(PacelineError):
    """Not possible in this state, such as a wrong policy version; `reason` and `metadata` say why."""


class NotFoundError(PacelineError):
    """No such batch, update or instance."""


class AlreadyExistsError(PacelineError):
    """The id is taken by a different request."""


class ResourceExhaustedError(PacelineError):
    """Full queues, KV or quota; `retry_after` may say when to come again."""


class UnavailableError(PacelineError):
    """The service, or the instances that it needs, cannot be reached now."""


class DeadlineExceededError(PacelineError):
    """The call took longer than its deadline."""


class DataLossError(PacelineError):
    """Data did not arrive as it was sent, such as weights with another checksum."""


class UnimplementedError(PacelineError):
    """The service does not have this capability."""


class UnauthenticatedError(PacelineError):
    """The token is missing or wrong."""


class PermissionDeniedError(PacelineError):
    """The token does not allow this."""


class CancelledError(PacelineError):
    """The call was cancelled, by this side or the other."""


class AbortedError(PacelineError):
    """Another change came between; read again and repeat."""


class InternalError(PacelineError):
    """A fault in the service; its log says more under `request_id`."""


_CLASSES: dict[grpc.StatusCode, type[PacelineError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgumentError,
    grpc.StatusCode.OUT_OF_RANGE: InvalidArgumentError,
    grpc.StatusCode.FAILED_PRECONDITION: FailedPreconditionError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExistsError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhaustedError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    grpc.StatusCode.DATA_LOSS: DataLossError,
    grpc.StatusCode.UNIMPLEMENTED: UnimplementedError,
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDeniedError,
    grpc.StatusCode.CANCELLED: CancelledError,
    grpc.StatusCode.ABORTED: AbortedError,
    grpc.StatusCode.INTERNAL: InternalError,
}


def from_rpc(error: grpc.RpcError) -> PacelineError:
    """Translates what grpc or grpc.aio raised, details included."""
    code: grpc.StatusCode = error.code()
    pairs: Any = error.trailing_metadata() or ()
    trailing = {key: value for key, value in pairs}
    request_id = trailing.get(REQUEST_ID_KEY)
    details = parse_details(trailing.get(STATUS_KEY, b""))
    return _CLASSES.get(code, PacelineError)(code, error.details() or "", details, request_id)


def parse_details(status: bytes) -> list[Message]:
    """The known google.rpc.* details in a serialised google.rpc.Status; none when it cannot be read."""
    try:
        packed = status_pb2.Status.FromString(status).details
        pairs = [(value, _DETAIL_TYPES.get(value.TypeName())) for value in packed]
        return [kind.FromString(value.value) for value, kind in pairs if kind is not None]
    except DecodeError:
        return []


def _violations(detail: Message) -> list[Violation]:
    if isinstance(detail, error_details_pb2.BadRequest):
        return [Violation(v.field, v.description) for v in detail.field_violations]
    if isinstance(detail, error_details_pb2.PreconditionFailure | error_details_pb2.QuotaFailure):
        return [Violation(v.subject, v.description) for v in detail.violations]
    return []


def cut_short() -> UnavailableError:
    """For a stream that ended without an error while samples were missing."""
    return UnavailableError(grpc.StatusCode.UNAVAILABLE, "the stream ended before the batch was complete")
