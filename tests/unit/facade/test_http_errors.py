"""Errors as HTTP answers."""

import grpc
import pytest

from paceline.errors import CancelledError, PacelineError, Violation
from services.contracts.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    ServiceError,
    Unauthenticated,
    Unavailable,
    Unimplemented,
)
from services.facade.http_errors import http_error, validation_error


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (InvalidArgument([Violation("sampling.top_p", "is 2")]), 400, "INVALID_ARGUMENT"),
        (Unauthenticated("no token"), 401, "UNAUTHENTICATED"),
        (PermissionDenied("no", "MISSING_SCOPE"), 403, "MISSING_SCOPE"),
        (NotFound("update", "u"), 404, "NOT_FOUND"),
        (FailedPrecondition("SAMPLES_UNFINISHED", "later"), 409, "SAMPLES_UNFINISHED"),
        (ResourceExhausted("queue", "full", 2.2), 429, "RESOURCE_EXHAUSTED"),
        (CancelledError(grpc.StatusCode.CANCELLED, "gone"), 499, "CANCELLED"),
        (Unimplemented("COLLECTIVE", "not there"), 501, "UNIMPLEMENTED"),
        (Unavailable("no gateway"), 503, "UNAVAILABLE"),
        (PacelineError(grpc.StatusCode.DEADLINE_EXCEEDED, "late"), 504, "DEADLINE_EXCEEDED"),
        (PacelineError(grpc.StatusCode.INTERNAL, "a fault"), 500, "INTERNAL"),
        (PacelineError(grpc.StatusCode.DATA_LOSS, "lost"), 500, "DATA_LOSS"),
    ],
)
def test_every_code_has_its_status(error: PacelineError | ServiceError, status: int, code: str) -> None:
    found = http_error(error)
    assert found.status == status
    assert found.body["error"]["code"] == code
    assert found.body["error"]["message"] == error.message
    assert found.body["error"]["param"] == ("top_p" if status == 400 else None)
    assert ("Retry-After" in found.headers) == (status in (429, 503))


def test_the_time_to_wait_is_in_whole_seconds_and_never_nothing() -> None:
    assert http_error(ResourceExhausted("queue", "full", 2.2)).headers["Retry-After"] == "3"
    assert http_error(ResourceExhausted("queue", "full", 0.01)).headers["Retry-After"] == "1"
    assert http_error(ResourceExhausted("queue", "full")).headers["Retry-After"] == "1"


def test_what_pydantic_refuses_is_named_and_not_repeated() -> None:
    problem = {"loc": ("body", "sampling_params", "top_p"), "msg": "must be a number", "input": "secret"}
    found = validation_error([problem])
    assert found.status == 400
    assert found.body["error"]["param"] == "sampling_params.top_p"
    assert "secret" not in str(found.body)
