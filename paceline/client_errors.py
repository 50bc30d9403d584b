"""Errors that the SDK finds itself: cut or silent streams, lost batches, broken pushes, shards that differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import grpc
from google.rpc import error_details_pb2

from paceline.errors import (
    BATCH_LOST,
    CALL_DROPPED,
    CUT_SHORT,
    EXTRA_MISSING,
    NO_RENDEZVOUS,
    RANK_LOST,
    SHARD_NOT_NAMED,
    SHARDS_DIFFER,
    SOURCE_READ_ONCE,
    STREAM_SILENT,
    UNREACHABLE,
    WRONG_ADDRESS,
    AbortedError,
    CancelledError,
    DataLossError,
    FailedPreconditionError,
    InvalidArgumentError,
    PacelineError,
    UnavailableError,
)
from paceline.installation import how_to_install
from paceline.misdirection import Misdirection


def invalid_argument(faults: Mapping[str, str]) -> InvalidArgumentError:
    """Return the error of a request that cannot be sent, by what is wrong with each of its fields."""
    fields = [
        error_details_pb2.BadRequest.FieldViolation(field=_unicode(field), description=_unicode(description))
        for field, description in faults.items()
    ]
    first, why = next(iter(faults.items()))
    details = [error_details_pb2.BadRequest(field_violations=fields)]
    return InvalidArgumentError(grpc.StatusCode.INVALID_ARGUMENT, f"{first}: {why}", details)


def cut_short() -> UnavailableError:
    """Return the error of a stream that ended without one while samples were missing."""
    info = error_details_pb2.ErrorInfo(reason=CUT_SHORT)
    message = "the stream ended before the batch was complete"
    return UnavailableError(grpc.StatusCode.UNAVAILABLE, message, [info])


def unreachable(failure: PacelineError, cause: Misdirection) -> UnavailableError:
    """Return the error of a call that has reached no gateway, with what to do."""
    info = error_details_pb2.ErrorInfo(reason=WRONG_ADDRESS if cause.final else UNREACHABLE)
    return UnavailableError(
        grpc.StatusCode.UNAVAILABLE, f"{cause.advice} ({failure.message})", [info], failure.request_id
    )


def client_closed() -> FailedPreconditionError:
    """Return the error of a call on a client that was closed."""
    info = error_details_pb2.ErrorInfo(reason="CLIENT_CLOSED")
    message = "the client is closed: make another one"
    return FailedPreconditionError(grpc.StatusCode.FAILED_PRECONDITION, message, [info])


def call_dropped(failure: CancelledError) -> UnavailableError:
    """Return the error of a call that was cancelled, but not from here: its server was too busy, or is stopping."""
    info = error_details_pb2.ErrorInfo(reason=CALL_DROPPED)
    message = f"the gateway has dropped the call ({failure.message})"
    return UnavailableError(
        grpc.StatusCode.UNAVAILABLE, message, [info, *failure.details], failure.request_id
    )


def stream_silent(method: str, seconds: float) -> UnavailableError:
    """Return the error of a stream on which nothing came for so long."""
    info = error_details_pb2.ErrorInfo(reason=STREAM_SILENT)
    message = f"the gateway has sent nothing on {method} for {seconds:g} s"
    return UnavailableError(grpc.StatusCode.UNAVAILABLE, message, [info])


def batch_lost(run_id: str, batch_id: str, cursor: int, cause: PacelineError) -> DataLossError:
    """Return the error of a batch that the gateway has lost and that cannot be submitted again from here."""
    info = error_details_pb2.ErrorInfo(
        reason=BATCH_LOST, metadata={"run_id": run_id, "batch_id": batch_id, "cursor": str(cursor)}
    )
    message = (
        f"the gateway has lost samples of batch {run_id}/{batch_id} after cursor {cursor}: {cause.message}"
    )
    return DataLossError(grpc.StatusCode.DATA_LOSS, message, [info], cause.request_id)


def session_differs(prompt_id: str, slot: int, position: int) -> DataLossError:
    """Return the error of a session that was generated again, and became another."""
    info = error_details_pb2.ErrorInfo(
        reason="SESSION_DIFFERS", metadata={"prompt_id": prompt_id, "slot": str(slot)}
    )
    message = (
        f"prompt {prompt_id!r} slot {slot} was lost and generated again, and what it says from position {position} "
        "on is not what was given before: begin the session anew"
    )
    return DataLossError(grpc.StatusCode.DATA_LOSS, message, [info])


def source_read_once(detail: str) -> AbortedError:
    """Return the error of a push that needs bytes of an iterator again."""
    info = error_details_pb2.ErrorInfo(reason=SOURCE_READ_ONCE)
    message = f"an instance died while weights were pushed, and an iterator cannot be read again: {detail}"
    return AbortedError(grpc.StatusCode.ABORTED, message, [info])


def stream_stalled(message: str) -> UnavailableError:
    """Return the error of a push to an instance that says nothing."""
    info = error_details_pb2.ErrorInfo(reason=STREAM_SILENT)
    return UnavailableError(grpc.StatusCode.UNAVAILABLE, message, [info])


def rank_lost(message: str) -> AbortedError:
    """Return the error of a push by several ranks, of which one failed or is gone."""
    info = error_details_pb2.ErrorInfo(reason=RANK_LOST)
    return AbortedError(grpc.StatusCode.ABORTED, message, [info])


def shards_differ(versions: Mapping[str, int]) -> FailedPreconditionError:
    """Return the error of shards that serve different versions, by their names."""
    served = {name: str(version) for name, version in versions.items()}
    info = error_details_pb2.ErrorInfo(reason=SHARDS_DIFFER, metadata=served)
    listed = ", ".join(f"{name} serves {version}" for name, version in served.items())
    message = f"the shards serve different versions ({listed}): push weights again, which go to all of them"
    return FailedPreconditionError(grpc.StatusCode.FAILED_PRECONDITION, message, [info])


def shard_not_named(method: str, names: Iterable[str]) -> FailedPreconditionError:
    """Return the error of a call of one deployment, made on a client of several."""
    info = error_details_pb2.ErrorInfo(reason=SHARD_NOT_NAMED)
    message = (
        f"{method} is a call to one deployment: make it on client.shard(name), one of {', '.join(names)}"
    )
    return FailedPreconditionError(grpc.StatusCode.FAILED_PRECONDITION, message, [info])


def extra_missing(extra: str, purpose: str, error: ImportError) -> FailedPreconditionError:
    """Return the error of a call that needs packages of an extra that is not installed."""
    info = error_details_pb2.ErrorInfo(reason=EXTRA_MISSING)
    message = f"{purpose} needs the extra `{extra}`: {how_to_install(extra)} ({error})"
    return FailedPreconditionError(grpc.StatusCode.FAILED_PRECONDITION, message, [info])


def no_rendezvous(message: str) -> FailedPreconditionError:
    """Return the error of a trainer that cannot open a broadcast."""
    info = error_details_pb2.ErrorInfo(reason=NO_RENDEZVOUS)
    return FailedPreconditionError(grpc.StatusCode.FAILED_PRECONDITION, message, [info])


def _unicode(text: str) -> str:
    """Return text without surrogates, which no message can hold."""
    return text.encode(errors="backslashreplace").decode()
