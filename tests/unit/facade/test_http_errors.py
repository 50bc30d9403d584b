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
from services.facade.dialects.sglang import NAMES
from services.facade.http_errors import fault, field_of, http_error, in_dialect, validation_error


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


@pytest.mark.parametrize(
    ("location", "field"),
    [
        (("body",), ""),
        (("body", 16), "[16]"),
        (("body", "prompt", "list[int]", 3), "prompt[3]"),
        (("body", "prompt", "list[list[constrained-int]]", 1, 2), "prompt[1][2]"),
        (("body", "prompt", "str"), "prompt"),
        (("body", "rewards", 2, "slot"), "rewards[2].slot"),
        (("query", "mode"), "mode"),
    ],
)
def test_a_field_is_named_as_in_the_request(location: tuple[str | int, ...], field: str) -> None:
    assert field_of(location) == field


def test_what_is_no_json_names_no_field() -> None:
    problem = {"type": "json_invalid", "loc": ("body", 16), "msg": "wrong", "ctx": {"error": "no comma"}}
    error = validation_error([problem]).body["error"]
    assert error["param"] is None
    assert error["message"] == "the body is no JSON: no comma at character 16"


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ("prompt_token_ids[3]", "input_ids"),
        ("sampling.max_tokens", "sampling_params.max_new_tokens"),
        ("sampling.stop[1]", "sampling_params.stop[1]"),
        ("disk.path", "disk.path"),
        ("", None),
    ],
)
def test_a_field_of_the_gateway_has_its_name_in_the_body(field: str, param: str | None) -> None:
    found = http_error(InvalidArgument([Violation(field, "is wrong")]), NAMES)
    assert found.body["error"]["param"] == param


def test_sglangs_paths_say_that_they_failed() -> None:
    found = in_dialect("/update_weights_from_disk", fault())
    assert found.body == {"success": False, "message": fault().body["error"]["message"], **fault().body}
    assert in_dialect("/generate", fault()) == fault()
