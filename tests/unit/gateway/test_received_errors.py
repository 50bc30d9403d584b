"""What a peer says of a call is passed on; a call that it dropped may be made again."""

from __future__ import annotations

import grpc
import pytest
from grpc.aio import Metadata

from services.contracts.errors import NotFound, to_status
from services.gateway.instances.connection import received_error


@pytest.mark.parametrize(
    ("code", "passed_on"),
    [
        (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE),
        (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAVAILABLE),
        (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.NOT_FOUND),
    ],
)
def test_a_dropped_call_is_unavailable_and_others_are_as_they_were(
    code: grpc.StatusCode, passed_on: grpc.StatusCode
) -> None:
    details = ("grpc-status-details-bin", to_status(NotFound("batch", "b")).SerializeToString())
    error = received_error(grpc.aio.AioRpcError(code, Metadata(), Metadata(details), "said"))
    assert (error.code, error.message) == (passed_on, "said")
    assert error.details
