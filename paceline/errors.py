"""Errors of calls: one class for each gRPC code, with the service's details readable.

    try:
        client.submit(batch)
    except paceline.InvalidArgumentError as error:
        for violation in error.violations:
            print(violation.field, violation.description)

`str(error)` includes all details. The functions at the end return the errors that the SDK raises without an answer
of the service: cut or silent streams, lost batches, failed pushes, wrong addresses. A wrong address is recognized
by gRPC's message, and the error says what to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

CHECKOUT = "a checkout of the repository"


def how_to_install(*extras: str, server: bool = False) -> str:
    """Return the command for an installation with `extras`, and with the server if `server`.

    Paceline is on no package index: it is installed from a checkout.
    """
    folder = f"'.[{','.join(extras)}]'" if extras else "."
    return f"pip install {folder}{' ./deploy/server' if server else ''} in {CHECKOUT}"


STATUS_KEY = "grpc-status-details-bin"
REQUEST_ID_KEY = "x-request-id"

# Values of `PacelineError.reason` for errors that the SDK raises itself.
CUT_SHORT = "CUT_SHORT"
"""The stream ended without an error while samples were missing."""
CALL_DROPPED = "CALL_DROPPED"
"""The call was cancelled, and not by this side."""
WRONG_ADDRESS = "WRONG_ADDRESS"
"""There is no gateway at the address, according to the answer from there."""
UNREACHABLE = "UNREACHABLE"
"""The call has reached no gateway, but there may be one soon."""
STREAM_SILENT = "STREAM_SILENT"
"""Nothing arrived on the stream, although the gateway was reached."""
BATCH_LOST = "BATCH_LOST"
"""The samples of the batch are lost, and this client does not have its request."""
SOURCE_READ_ONCE = "SOURCE_READ_ONCE"
"""The tensors of the push came from an iterator, and would have to be read again."""
SHARDS_DIFFER = "SHARDS_DIFFER"
"""The shards serve different versions; `metadata` has the version of each by its name."""
SHARD_NOT_NAMED = "SHARD_NOT_NAMED"
"""A call to one deployment was made on a client of several."""
RANK_LOST = "RANK_LOST"
"""A rank of a push by several ranks failed or is gone."""
EXTRA_MISSING = "EXTRA_MISSING"
"""The call needs packages that are missing; the message says how to install them."""

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
    """Path of the field, such as `groups[3].samples`."""
    description: str
    """The fault, and the values that are allowed."""


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
        """The gRPC code."""
        self.message = message
        """The fault, without the details."""
        self.details = tuple(details)
        """google.rpc.* messages of known types."""
        self.request_id = request_id
        """Id of the call in the service's logs."""
        self.shard = ""
        """Name of the shard, or names of the shards, that raised it; empty for a client of one deployment."""
        self.served: Mapping[str, int] = {}
        """Known versions that the shards serve, by name, after a failed push to several."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to create the error in another process, such as the caller of a Ray actor."""
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
        """Return code and message, then a line for the reason and for each violation that the message lacks."""
        lines = [f"{self.code.name}: {self.message}"]
        if self.shard:
            lines[0] += f" (shard {self.shard})"
        described = [f"{violation.field}: {violation.description}" for violation in self.violations]
        # The message usually has all of them.
        lines += [f"  {each}" for each in described if each not in self.message]
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
        """Return the text of other errors, and where a token comes from."""
        return f"{super().__str__()}\n  a token comes from token=, PACELINE_TOKEN or PACELINE_TOKEN_FILE"


class PermissionDeniedError(PacelineError):
    """The token does not allow this."""


class CancelledError(PacelineError):
    """The call was cancelled by this side: the client was closed, or a call on another shard failed."""


class AbortedError(PacelineError):
    """Another change came first; read the state again and repeat the call."""


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
    """Translate an error that grpc or grpc.aio raised, with its details."""
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
    """Set the shard's name on errors that are raised in the block, unless they have one."""
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


@dataclass(frozen=True, slots=True)
class Misdirection:
    """Likely cause of calls that reach no gateway."""

    advice: str
    final: bool = True
    """False: a gateway that is starting or restarting looks the same."""


CLOSES = Misdirection("what listens there closes the connection: check the address", final=False)
NEEDS_TLS = Misdirection(
    "the gateway speaks TLS: give tls=paceline.Tls(ca_file=...), with a client certificate if it asks for one"
)
"""Replaces `CLOSES` when a server that closes connections in plain text answers a TLS handshake."""
_CAUSES = (
    (
        ("http1.x server", "Expected SETTINGS frame"),
        Misdirection(
            "something that speaks HTTP/1 answers there, such as the facade or a metrics port: give the gateway's "
            "gRPC port, which is 7400 unless it was set"
        ),
    ),
    (
        ("Domain name not found", "address lookup failed", "DNS resolution failed"),
        Misdirection("the name of the host is not known on this machine: check the address"),
    ),
    (
        ("WRONG_VERSION_NUMBER",),
        Misdirection(
            "what answers there has no TLS: check the port, or leave tls out if the gateway has none"
        ),
    ),
    (
        ("CERTIFICATE_VERIFY_FAILED",),
        Misdirection("its certificate is not of a trusted authority: give tls=paceline.Tls(ca_file=...)"),
    ),
    (
        ("Hostname Verification Check failed",),
        Misdirection("its certificate is for another name: give tls=paceline.Tls(..., server_name=...)"),
    ),
    (
        ("Connection refused",),
        Misdirection(
            "nothing listens there: is the gateway running? `paceline up` starts one here", final=False
        ),
    ),
    (("Socket closed", "Connection reset", "Broken pipe"), CLOSES),
    (
        ("backend unhealthy",),
        Misdirection("it is no gateway that leads: another one does, or none yet", final=False),
    ),
)
"""Words in gRPC's messages and their causes. The first match counts, as a message may have several errors."""


def misdirection_of(message: str) -> Misdirection | None:
    """Return why no gateway was reached, if gRPC's message shows it."""
    for words, cause in _CAUSES:
        if any(each in message for each in words):
            return cause
    return None


def invalid_argument(faults: Mapping[str, str]) -> InvalidArgumentError:
    """Return the error of a request that cannot be sent; `faults` are descriptions by field."""
    fields = [
        error_details_pb2.BadRequest.FieldViolation(field=_unicode(field), description=_unicode(description))
        for field, description in faults.items()
    ]
    first, why = next(iter(faults.items()))
    details = [error_details_pb2.BadRequest(field_violations=fields)]
    return InvalidArgumentError(grpc.StatusCode.INVALID_ARGUMENT, f"{first}: {why}", details)


def cut_short() -> UnavailableError:
    """Return the error of a stream that ended without an error while samples were missing."""
    return _unavailable(CUT_SHORT, "the stream ended before the batch was complete")


def unreachable(failure: PacelineError, cause: Misdirection) -> UnavailableError:
    """Return the error of a call that has reached no gateway, with what to do."""
    reason = WRONG_ADDRESS if cause.final else UNREACHABLE
    return _unavailable(reason, f"{cause.advice} ({failure.message})", request_id=failure.request_id)


def client_closed() -> FailedPreconditionError:
    """Return the error of a call on a client that was closed."""
    return _failed_precondition("CLIENT_CLOSED", "the client is closed: make another one")


def call_dropped(failure: CancelledError) -> UnavailableError:
    """Return the error of a call that the server cancelled, because it is busy or stopping."""
    message = f"the gateway has dropped the call ({failure.message})"
    return _unavailable(CALL_DROPPED, message, failure.details, failure.request_id)


def stream_silent(method: str, seconds: float) -> UnavailableError:
    """Return the error of a stream on which nothing arrived for `seconds`."""
    return _unavailable(STREAM_SILENT, f"the gateway has sent nothing on {method} for {seconds:g} s")


def batch_lost(run_id: str, batch_id: str, cursor: int, cause: PacelineError) -> DataLossError:
    """Return the error of a batch that the gateway has lost and that this client cannot submit again."""
    metadata = {"run_id": run_id, "batch_id": batch_id, "cursor": str(cursor)}
    message = (
        f"the gateway has lost samples of batch {run_id}/{batch_id} after cursor {cursor}: {cause.message}"
    )
    return _data_loss(BATCH_LOST, message, metadata, cause.request_id)


def session_differs(prompt_id: str, slot: int, position: int) -> DataLossError:
    """Return the error of a session that was generated again with different tokens."""
    message = (
        f"prompt {prompt_id!r} slot {slot} was lost and generated again, and its tokens from position {position} "
        "on differ from the ones given before: begin a new session"
    )
    return _data_loss("SESSION_DIFFERS", message, {"prompt_id": prompt_id, "slot": str(slot)})


def source_read_once(detail: str) -> AbortedError:
    """Return the error of a push that needs the tensors of an iterator a second time."""
    message = f"an instance died while weights were pushed, and an iterator cannot be read again: {detail}"
    return _aborted(SOURCE_READ_ONCE, message)


def stream_stalled(message: str) -> UnavailableError:
    """Return the error of a push to an instance that does not answer."""
    return _unavailable(STREAM_SILENT, message)


def rank_lost(message: str) -> AbortedError:
    """Return the error of a push by several ranks, of which one failed or is gone."""
    return _aborted(RANK_LOST, message)


def shards_differ(versions: Mapping[str, int]) -> FailedPreconditionError:
    """Return the error of shards that serve different versions, by their names."""
    served = {name: str(version) for name, version in versions.items()}
    listed = ", ".join(f"{name} serves {version}" for name, version in served.items())
    message = f"the shards serve different versions ({listed}): push weights again, to all of them"
    return _failed_precondition(SHARDS_DIFFER, message, served)


def shard_not_named(method: str, names: Iterable[str]) -> FailedPreconditionError:
    """Return the error of a call to one deployment, made on a client of several."""
    message = (
        f"{method} is a call to one deployment: make it on client.shard(name), one of {', '.join(names)}"
    )
    return _failed_precondition(SHARD_NOT_NAMED, message)


def extra_missing(extra: str, purpose: str, error: ImportError) -> FailedPreconditionError:
    """Return the error of a call that needs packages of an extra that is not installed."""
    message = f"{purpose} needs the extra `{extra}`: {how_to_install(extra)} ({error})"
    return _failed_precondition(EXTRA_MISSING, message)


def _info(reason: str, metadata: Mapping[str, str] | None = None) -> error_details_pb2.ErrorInfo:
    return error_details_pb2.ErrorInfo(reason=reason, metadata=metadata or {})


def _unavailable(
    reason: str, message: str, details: Iterable[Message] = (), request_id: str | None = None
) -> UnavailableError:
    return UnavailableError(grpc.StatusCode.UNAVAILABLE, message, [_info(reason), *details], request_id)


def _failed_precondition(
    reason: str, message: str, metadata: Mapping[str, str] | None = None
) -> FailedPreconditionError:
    return FailedPreconditionError(grpc.StatusCode.FAILED_PRECONDITION, message, [_info(reason, metadata)])


def _data_loss(
    reason: str, message: str, metadata: Mapping[str, str], request_id: str | None = None
) -> DataLossError:
    return DataLossError(grpc.StatusCode.DATA_LOSS, message, [_info(reason, metadata)], request_id)


def _aborted(reason: str, message: str) -> AbortedError:
    return AbortedError(grpc.StatusCode.ABORTED, message, [_info(reason)])


def _unicode(text: str) -> str:
    """Return text without surrogates, which no message can hold."""
    return text.encode(errors="backslashreplace").decode()
