"""Errors of calls: details, and their text."""

import pickle

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from paceline.errors import FailedPreconditionError, InvalidArgumentError, invalid_argument, parse_details


def packed(*details: Message) -> bytes:
    status = status_pb2.Status(code=9)
    for detail in details:
        status.details.add().Pack(detail)
    return status.SerializeToString()


def test_details_survive_the_wire() -> None:
    info = error_details_pb2.ErrorInfo(reason="STALE", domain="paceline", metadata={"current": "4"})
    retry = error_details_pb2.RetryInfo()
    retry.retry_delay.FromMilliseconds(1500)
    details = parse_details(packed(info, retry))
    error = FailedPreconditionError(grpc.StatusCode.FAILED_PRECONDITION, "stale", details)
    assert (error.reason, error.metadata, error.retry_after) == ("STALE", {"current": "4"}, 1.5)


def test_unknown_and_broken_details_are_left_out() -> None:
    unknown = any_pb2.Any(type_url="type.googleapis.com/google.rpc.DebugInfo", value=b"\x0a\x01x")
    status = status_pb2.Status(details=[unknown])
    assert parse_details(status.SerializeToString()) == []
    assert parse_details(b"\xff\xff") == []
    assert parse_details(b"") == []


def test_an_error_without_details_has_empty_ones() -> None:
    error = InvalidArgumentError(grpc.StatusCode.INVALID_ARGUMENT, "bad")
    assert (error.violations, error.reason, error.metadata, error.retry_after) == ((), "", {}, None)


def test_an_error_reads_well() -> None:
    bad = error_details_pb2.BadRequest()
    bad.field_violations.add(field="groups[1].samples", description="is 0, allowed is >= 1")
    quota = error_details_pb2.QuotaFailure()
    quota.violations.add(subject="queue", description="holds 10 samples")
    info = error_details_pb2.ErrorInfo(reason="FULL", metadata={"b": "2", "a": "1"})
    error = InvalidArgumentError(grpc.StatusCode.INVALID_ARGUMENT, "bad batch", [bad, quota, info], "r1")
    assert str(error).splitlines() == [
        "INVALID_ARGUMENT: bad batch",
        "  groups[1].samples: is 0, allowed is >= 1",
        "  queue: holds 10 samples",
        "  reason FULL (a=1, b=2)",
        "  request r1",
    ]


def test_an_error_names_each_fault_once() -> None:
    assert str(invalid_argument({"step": "is -1"})) == "INVALID_ARGUMENT: step: is -1"
    both = str(invalid_argument({"step": "is -1", "groups": "is empty"}))
    assert both.splitlines() == ["INVALID_ARGUMENT: step: is -1", "  groups: is empty"]


def test_errors_go_to_other_processes_as_they_are() -> None:
    info = error_details_pb2.ErrorInfo(reason="STALE", metadata={"current": "4"})
    error = FailedPreconditionError(grpc.StatusCode.FAILED_PRECONDITION, "stale", [info], "request-1")
    error.shard = "a"
    found = pickle.loads(pickle.dumps(error))
    assert type(found) is FailedPreconditionError
    assert (str(found), found.reason, found.shard) == (str(error), "STALE", "a")
