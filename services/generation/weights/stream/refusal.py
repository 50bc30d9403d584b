"""Refusal of weights by an instance, as those who fetch them from it are told."""

from __future__ import annotations

import grpc
from google.rpc import error_details_pb2

from paceline.errors import parse_details
from services.contracts.errors import DOMAIN, ServiceError

_REASON = "WEIGHTS_REFUSED"
_STATUS_DETAILS = "grpc-status-details-bin"


class WeightsRefused(ServiceError):
    """Raised to who wants weights that were refused here: code, message and details are those of the refusal."""

    def __init__(self, refusal: ServiceError) -> None:
        # First, since details that have no room are left out.
        told = error_details_pb2.ErrorInfo(reason=_REASON, domain=DOMAIN)
        super().__init__(refusal.message, told, *refusal.details, code=refusal.code)


def refusal_of(error: grpc.aio.AioRpcError) -> ServiceError | None:
    """Return the refusal of which a peer tells; None if it failed otherwise."""
    for key, value in error.trailing_metadata() or ():
        if key == _STATUS_DETAILS and isinstance(value, bytes):
            details = parse_details(value)
            others = [each for each in details if getattr(each, "reason", "") != _REASON]
            if len(others) < len(details):
                return ServiceError(error.details() or "", *others, code=error.code())
    return None
