"""Convert errors of calls to HTTP answers, in the form of OpenAI's API. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from paceline import types as t
from paceline.errors import InternalError, InvalidArgumentError, PacelineError, Violation
from services.contracts.errors import InvalidArgument, ServiceError

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
_PROMPT = "prompt_token_ids"
_PLACES = ("body", "query", "path", "header")
"""First parts of a location, for the place of a field in a request."""
_TYPES = ("bool", "float", "int", "str")
_WITH_SUCCESS = frozenset(
    {"/abort_request", "/continue_generation", "/pause_generation", "/update_weights_from_disk"}
)
"""Paths of SGLang's server whose answers have a field `success`, also in errors."""
_WITH_RETRY = (429, 503)


@dataclass(frozen=True, slots=True)
class HttpError:
    """Answer to a request that failed."""

    status: int
    body: dict[str, Any]
    headers: dict[str, str]


def http_error(error: PacelineError | ServiceError, names: Mapping[str, str] | None = None) -> HttpError:
    """Return the answer for an error of the gateway or of this process.

    `param` is the first wrong field, under its name in the body; `names` has the names that differ from the SDK's.
    `code` is the reason, such as `STALE_VERSION`.
    """
    if isinstance(error, ServiceError):
        error = PacelineError(error.code, error.message, error.details)
    status, kind = _STATUS.get(error.code, _FAULT)
    param = None
    if status in (400, 404) and error.violations:
        param = _name_in_body(error.violations[0].field, names or {})
    headers: dict[str, str] = {}
    if status in _WITH_RETRY:
        # Whole seconds, and never 0, because a client would then retry at once.
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after or 1.0)))
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    body = error_body(error.message, kind, param=param, code=error.reason or error.code.name)
    return HttpError(status, body, headers)


def _name_in_body(field: str, names: Mapping[str, str]) -> str | None:
    """Return the name that a body has for a field of the gateway's request."""
    if field.startswith(_PROMPT):
        # Its ids are checked before they are sent, so the prompt as a whole is wrong.
        return names.get("prompt", "prompt")
    field = field.removeprefix("sampling.")
    name, bracket, place = field.partition("[")
    return names.get(name, name) + bracket + place or None


def in_dialect(path: str, found: HttpError) -> HttpError:
    """Return an error in the form of the path's dialect."""
    if path not in _WITH_SUCCESS:
        return found
    body = {"success": False, "message": found.body["error"]["message"], **found.body}
    return HttpError(found.status, body, found.headers)


def fault() -> HttpError:
    """Return the answer for a defect of this process."""
    message = "the facade failed; its log says more, under the x-request-id of this answer"
    return HttpError(500, error_body(message, "server_error", param=None, code="INTERNAL"), {})


def error_of(sample: t.Sample) -> PacelineError:
    """Return the error of a failed sample: InvalidArgument if a field of its request is wrong."""
    failure = sample.failure
    if failure is not None and failure.code == "INVALID_ARGUMENT":
        wrong = InvalidArgument([Violation(failure.field, failure.reason)])
        return InvalidArgumentError(wrong.code, wrong.message, wrong.details)
    return InternalError(grpc.StatusCode.INTERNAL, f"a sample could not be generated: {sample.error}")


def error_body(message: str, kind: str, *, param: str | None, code: str) -> dict[str, Any]:
    """Return the body of an error in the form of OpenAI's API."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def validation_error(problems: Sequence[Mapping[str, Any]]) -> HttpError:
    """Return the answer for a body that pydantic refused; `problems` are pydantic's errors, which name fields.

    Values are not repeated, because a prompt may be long, and may be private.
    """
    fields = [field_of(each["loc"]) for each in problems]
    lines = [f"{field or 'the body'}: {each['msg']}" for field, each in zip(fields, problems, strict=True)]
    param = fields[0] if fields else None
    if problems and problems[0].get("type") == "json_invalid":
        found = problems[0]
        reason = found.get("ctx", {}).get("error", found["msg"])
        lines, param = [f"the body is no JSON: {reason} at character {found['loc'][-1]}"], None
    text = "; ".join(list(dict.fromkeys(lines))[:5])
    body = error_body(text, "invalid_request_error", param=param or None, code="INVALID_ARGUMENT")
    return HttpError(400, body, {})


def field_of(location: Sequence[Any]) -> str:
    """Return the path of a field, such as `sampling_params.top_p` or `messages[0]`; empty for the whole body.

    A location may include the tried member of a union, such as `list[int]`, which is not a field.
    """
    path = ""
    for part in location[1:] if location and location[0] in _PLACES else location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in _TYPES:
            path += f".{part}" if path else part
    return path
