"""The google.rpc.Status of every kind of error."""

from __future__ import annotations

from urllib.parse import quote

import grpc
import pytest
from google.protobuf.message import Message
from google.rpc import error_details_pb2 as details

from paceline.errors import Violation
from services.contracts import errors
from services.contracts.errors import MAX_DETAILS, ServiceError, to_status

PLAIN = "".join(chr(code) for code in range(ord(" "), ord("~") + 1) if chr(code) != "%")
"""What gRPC sends as it is; anything else is percent-encoded."""

CASES: list[tuple[ServiceError, grpc.StatusCode, set[str]]] = [
    (
        errors.InvalidArgument([Violation("groups[0].samples", "is 0; must be >= 1")]),
        grpc.StatusCode.INVALID_ARGUMENT,
        {"BadRequest", "ErrorInfo"},
    ),
    (
        errors.FailedPrecondition("WRONG_POLICY_VERSION", "have 3", wanted="4"),
        grpc.StatusCode.FAILED_PRECONDITION,
        {"PreconditionFailure", "ErrorInfo"},
    ),
    (errors.NotFound("batch", "b1"), grpc.StatusCode.NOT_FOUND, {"ResourceInfo", "ErrorInfo"}),
    (errors.AlreadyExists("batch", "b1"), grpc.StatusCode.ALREADY_EXISTS, {"ResourceInfo", "ErrorInfo"}),
    (
        errors.ResourceExhausted("queue", "full", retry_after=2.5),
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        {"QuotaFailure", "ErrorInfo", "RetryInfo"},
    ),
    (
        errors.ResourceExhausted("queue", "full"),
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        {"QuotaFailure", "ErrorInfo"},
    ),
    (errors.Unavailable("no instance"), grpc.StatusCode.UNAVAILABLE, {"ErrorInfo", "RetryInfo"}),
    (errors.DataLoss("bad checksum"), grpc.StatusCode.DATA_LOSS, {"ErrorInfo"}),
    (errors.Unimplemented("lenient", "not here"), grpc.StatusCode.UNIMPLEMENTED, {"ErrorInfo"}),
    (errors.Unauthenticated("who?"), grpc.StatusCode.UNAUTHENTICATED, {"ErrorInfo"}),
    (errors.PermissionDenied("no"), grpc.StatusCode.PERMISSION_DENIED, {"ErrorInfo"}),
]


def unpacked(error: ServiceError) -> dict[str, Message]:
    """Return the details of the status by the name of their type."""
    found: dict[str, Message] = {}
    for packed in to_status(error).details:
        name = packed.TypeName().removeprefix("google.rpc.")
        message = getattr(details, name)()
        assert packed.Unpack(message)
        found[name] = message
    return found


@pytest.mark.parametrize(("error", "code", "kinds"), CASES, ids=lambda case: type(case).__name__)
def test_every_error_has_its_code_and_details(
    error: ServiceError, code: grpc.StatusCode, kinds: set[str]
) -> None:
    status = to_status(error)
    assert status.code == code.value[0]
    assert status.message == error.message == str(error)
    found = unpacked(error)
    assert found.keys() == kinds
    info = found["ErrorInfo"]
    assert isinstance(info, details.ErrorInfo)
    assert info.domain == "paceline"
    assert info.reason.isupper()


def test_violations_are_in_details_and_message() -> None:
    error = errors.InvalidArgument([Violation("a.b", "is 1"), Violation("c", "is 2")])
    assert error.message == "a.b: is 1; c: is 2"
    found = unpacked(error)["BadRequest"]
    assert [(each.field, each.description) for each in found.field_violations] == [
        ("a.b", "is 1"),
        ("c", "is 2"),
    ]


def test_precondition_carries_reason_and_metadata() -> None:
    found = unpacked(errors.FailedPrecondition("WRONG_POLICY_VERSION", "have 3", wanted="4", current="3"))
    assert found["PreconditionFailure"].violations[0].type == "WRONG_POLICY_VERSION"
    assert found["ErrorInfo"].reason == "WRONG_POLICY_VERSION"
    assert dict(found["ErrorInfo"].metadata) == {"wanted": "4", "current": "3"}


def test_retry_delay_is_in_seconds() -> None:
    found = unpacked(errors.Unavailable("later", retry_after=0.25))
    assert found["RetryInfo"].retry_delay.ToMilliseconds() == 250


@pytest.mark.parametrize("text", ["x", "é", "%", "漢", "\udc80"])
@pytest.mark.parametrize("count", [1, 100, 5000])
def test_status_always_fits_into_a_trailer(count: int, text: str) -> None:
    error = errors.InvalidArgument([Violation(f"f[{index}]", text * 2000) for index in range(count)])
    status = to_status(error)
    assert status.ByteSize() <= MAX_DETAILS + errors.MAX_MESSAGE + 64
    assert len(quote(status.message, safe=PLAIN)) <= errors.MAX_MESSAGE
    assert status.message.endswith("...")
    kept = len(unpacked(error)["BadRequest"].field_violations)
    assert kept == count if count <= 1 else 1 < kept < count


def test_short_texts_are_left_as_they_are() -> None:
    assert to_status(errors.DataLoss("é" * 100)).message == "é" * 100
