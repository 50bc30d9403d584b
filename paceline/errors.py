"""The errors that calls raise: one class for each gRPC code, with the service's details readable.

    try:
        client.submit(batch)
    except paceline.InvalidArgumentError as error:
        for violation in error.violations:
            print(violation.field, violation.description)

`str(error)` says all of it. `client_errors` makes those that the SDK raises by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

STATUS_KEY = "grpc-status-details-bin"
REQUEST_ID_KEY = "x-request-id"

CUT_SHORT = "CUT_SHORT"
"""Reason of the error of a stream that ended without one while samples were missing."""
CALL_DROPPED = "CALL_DROPPED"
"""Reason of the error of a call that was cancelled, and not by this side."""
WRONG_ADDRESS = "WRONG_ADDRESS"
"""Reason of the error of a call to an address at which there is no gateway, as what answers there says."""
UNREACHABLE = "UNREACHABLE"
"""Reason of the error of a call that has reached no gateway, though there may be one soon."""
STREAM_SILENT = "STREAM_SILENT"
"""Reason of the error of a stream on which nothing came, though the gateway was reached."""
BATCH_LOST = "BATCH_LOST"
"""Reason of the error of a batch whose samples are lost, and whose request this client does not have."""
SOURCE_READ_ONCE = "SOURCE_READ_ONCE"
"""Reason of the error of a push whose tensors came from an iterator, and would have to be read again."""
SHARDS_DIFFER = "SHARDS_DIFFER"
"""Reason of the error of shards that serve different versions; `metadata` has that of each by its name."""
SHARD_NOT_NAMED = "SHARD_NOT_NAMED"
"""Reason of the error of a call of one deployment, made on a client of several."""
RANK_LOST = "RANK_LOST"
"""Reason of the error of a push by several ranks, of which one failed or is gone."""
EXTRA_MISSING = "EXTRA_MISSING"
"""Reason of the error of a call that needs packages that are missing; the message says how to install them."""
NO_RENDEZVOUS = "NO_RENDEZVOUS"
"""Reason of the error of a push by broadcast from a trainer that cannot open one."""

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
    """Wrong field (or subject) of a request, and what is allowed."""

    field: str
    description: str


class PacelineError(Exception):
    """Base of all errors of calls: refused by the service, or never delivered."""

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
        """google.rpc.* messages of known types."""
        self.request_id = request_id
        """Id of the call in the service's logs."""
        self.shard = ""
        """Name of the shard that it came from, or names, where a client has several."""
        self.served: Mapping[str, int] = {}
        """Versions that the shards serve, by name, after a push to several that failed, as far as is known."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what makes it again in another process, such as the one that called a Ray actor."""
        return type(self), (self.code, self.message, self.details, self.request_id), self.__dict__

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
        """Details of the reason: wrong and allowed values by name."""
        infos = [d for d in self.details if isinstance(d, error_details_pb2.ErrorInfo)]
        return dict(infos[0].metadata) if infos else {}

    @property
    def retry_after(self) -> float | None:
        """Seconds that the service asks to wait before a retry; None: it did not say."""
        infos = [d for d in self.details if isinstance(d, error_details_pb2.RetryInfo)]
        return infos[0].retry_delay.ToTimedelta().total_seconds() if infos else None

    def __str__(self) -> str:
        """Return code and message, then a line for each violation and for the reason."""
        lines = [f"{self.code.name}: {self.message}"]
        if self.shard:
            lines[0] += f" (shard {self.shard})"
        lines += [f"  {violation.field}: {violation.description}" for violation in self.violations]
        if self.reason:
            pairs = ", ".join(f"{key}={value}" for key, value in sorted(self.metadata.items()))
            lines.append(f"  reason {self.reason}" + (f" ({pairs})" if pairs else ""))
        if self.served:
            lines.append(
                "  served: " + ", ".join(f"{name} {version}" for name, version in self.served.items())
            )
        if self.request_id:
            lines.append(f"  request {self.request_id}")
        return "\n".join(lines)


class InvalidArgumentError(PacelineError):
    """Bad input; `violations` names the fields."""


class FailedPreconditionError(PacelineError):
    """The state does not allow the call, such as a wrong policy version; see `reason` and `metadata`."""


class NotFoundError(PacelineError):
    """No such batch, update or instance."""


class AlreadyExistsError(PacelineError):
    """The id is taken by a different request."""


class ResourceExhaustedError(PacelineError):
    """Queues, KV cache or quota are full; `retry_after` may say when to retry."""


class UnavailableError(PacelineError):
    """The service, or the instances that it needs, cannot be reached now."""


class DeadlineExceededError(PacelineError):
    """The call took longer than its deadline."""


class DataLossError(PacelineError):
    """Data did not arrive as it was sent, such as weights with another checksum, or is lost.

    Of a lost batch the `reason` is BATCH_LOST, and `metadata` has its `run_id`, `batch_id` and the `cursor`.
    """


class UnimplementedError(PacelineError):
    """The service does not have this capability."""


class UnauthenticatedError(PacelineError):
    """The token is missing or wrong."""

    def __str__(self) -> str:
        """Return what the others return, and where a token comes from."""
        return f"{super().__str__()}\n  a token comes from token=, PACELINE_TOKEN or PACELINE_TOKEN_FILE"


class PermissionDeniedError(PacelineError):
    """The token does not allow this."""


class CancelledError(PacelineError):
    """The call was cancelled by this side, which closed the client or stopped a call on another shard."""


class AbortedError(PacelineError):
    """Another change came first; read again and repeat."""


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
    """Translate what grpc or grpc.aio raised, details included."""
    code: grpc.StatusCode = error.code()
    pairs: Any = error.trailing_metadata() or ()
    trailing = {key: value for key, value in pairs}
    request_id = trailing.get(REQUEST_ID_KEY)
    details = parse_details(trailing.get(STATUS_KEY, b""))
    return _CLASSES.get(code, PacelineError)(code, error.details() or "", details, request_id)


def parse_details(status: bytes) -> list[Message]:
    """Return the known google.rpc.* details of a serialized google.rpc.Status; none if it cannot be parsed."""
    try:
        packed = status_pb2.Status.FromString(status).details
        pairs = [(value, _DETAIL_TYPES.get(value.TypeName())) for value in packed]
        return [kind.FromString(value.value) for value, kind in pairs if kind is not None]
    except DecodeError:
        return []


@contextmanager
def on_shard(name: str) -> Iterator[None]:
    """Give errors that are raised in the block the name of their shard, unless they have one."""
    try:
        yield
    except PacelineError as error:
        error.shard = error.shard or name
        raise


def _violations(detail: Message) -> list[Violation]:
    if isinstance(detail, error_details_pb2.BadRequest):
        return [Violation(v.field, v.description) for v in detail.field_violations]
    if isinstance(detail, error_details_pb2.PreconditionFailure | error_details_pb2.QuotaFailure):
        return [Violation(v.subject, v.description) for v in detail.violations]
    return []
