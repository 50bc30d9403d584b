"""Errors of calls as HTTP answers, in the form of OpenAI's API. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from paceline.errors import PacelineError
from services.contracts.errors import ServiceError

_STATUS: dict[grpc.StatusCode, tuple[int, str]] = {
    grpc.StatusCode.INVALID_ARGUMENT: (400, "invalid_request_error"),
    grpc.StatusCode.OUT_OF_RANGE: (400, "invalid_request_error"),
    grpc.StatusCode.UNAUTHENTICATED: (401, "authentication_error"),
    grpc.StatusCode.PERMISSION_DENIED: (403, "permission_error"),
    grpc.StatusCode.NOT_FOUND: (404, "not_found_error"),
    grpc.StatusCode.FAILED_PRECONDITION: (409, "conflict_error"),
    grpc.StatusCode.ALREADY_EXISTS: (409, "conflict_error"),
    grpc.StatusCode.ABORTED: (409, "conflict_error"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (429, "rate_limit_error"),
    grpc.StatusCode.CANCELLED: (499, "cancelled_error"),
    grpc.StatusCode.UNIMPLEMENTED: (501, "not_implemented_error"),
    grpc.StatusCode.UNAVAILABLE: (503, "unavailable_error"),
    grpc.StatusCode.DEADLINE_EXCEEDED: (504, "timeout_error"),
}
_FAULT = (500, "server_error")
_COMES_AGAIN = (429, 503)


@dataclass(frozen=True, slots=True)
class HttpError:
    """Answer to a request that failed."""

    status: int
    body: dict[str, Any]
    headers: dict[str, str]


def http_error(error: PacelineError | ServiceError) -> HttpError:
    """Return the answer for an error of the gateway or of this process.

    `param` is the first field at fault, and `code` the reason, such as `STALE_VERSION`.
    """
    if isinstance(error, ServiceError):
        error = PacelineError(error.code, error.message, error.details)
    status, kind = _STATUS.get(error.code, _FAULT)
    param = (
        error.violations[0].field.removeprefix("sampling.") if status == 400 and error.violations else None
    )
    headers: dict[str, str] = {}
    if status in _COMES_AGAIN:
        # Whole seconds, and never 0: a client that waits 0 s would come again at once.
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after or 1.0)))
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    body = error_body(error.message, kind, param=param, code=error.reason or error.code.name)
    return HttpError(status, body, headers)


def error_body(message: str, kind: str, *, param: str | None, code: str) -> dict[str, Any]:
    """Return the body of an error in the form of OpenAI's API."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def validation_error(problems: Sequence[Mapping[str, Any]]) -> HttpError:
    """Return the answer for a body that pydantic refused; `problems` are its errors, which name fields.

    Values are not repeated: a prompt may be long, and may be nobody's business.
    """
    lines = [f"{field_of(each['loc'])}: {each['msg']}" for each in problems]
    param = field_of(problems[0]["loc"]) if problems else None
    body = error_body("; ".join(lines[:5]), "invalid_request_error", param=param, code="INVALID_ARGUMENT")
    return HttpError(400, body, {})


def field_of(location: Sequence[Any]) -> str:
    """Return the path of a field in a body, such as `sampling_params.top_p`."""
    path = [str(part) for part in location if part != "body"]
    return ".".join(path) or "body"
