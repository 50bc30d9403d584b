"""Verdict on what instances said of the weights that they were to stage. Pure."""

from collections.abc import Sequence

import grpc
import structlog

from paceline.v1 import weight_pb2 as pb
from services.contracts.errors import DataLoss, ServiceError, Unavailable
from services.gateway.connections.connection import InstanceResult

log = structlog.get_logger(__name__)

# Codes by which an instance says that it is unwell itself, rather than that the weights are wrong.
_UNWELL = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.ABORTED,
    }
)
# Codes by which an instance says that it could not receive what others could: its disk is full, for example.
_UNABLE = frozenset(
    {
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.DATA_LOSS,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)


def judge(
    results: Sequence[InstanceResult], *, streamed: bool, announced: str = ""
) -> tuple[dict[str, pb.InstanceUpdate], str]:
    """Return what each instance that could stage the weights said, and the checksum on which they agree.

    An instance that finds them wrong ends the attempt everywhere, with its error; one that does not answer does not
    count. Weights that were `streamed` may have been damaged on the way to one instance, or its disk is full: that
    counts only if it is so with all.

    Raises:
        Unavailable: no instance could stage them, and none of them is to blame.
        ServiceError: the weights are wrong, or not those that the sender `announced`.
    """
    own = _UNWELL
    if streamed and any(result.error is None for result in results):
        own = _UNWELL | _UNABLE
    staged = {}
    for result in results:
        instance_id, error = result.connection.instance_id, result.error
        if error is None:
            staged[instance_id] = result.update
        elif error.code in own:
            # It serves the old version for as long as that is published, and is brought up after.
            log.warning("not_staged", instance=instance_id, error=error.message)
        else:
            raise ServiceError(f"{instance_id}: {error.message}", *error.details, code=error.code)
    if not staged:
        raise Unavailable("no instance could stage the weights", retry_after=2.0)
    checksums = {instance_id: update.checksum for instance_id, update in staged.items()}
    if len(set(checksums.values())) > 1:
        raise DataLoss(f"instances read different weights from the same path: {checksums}")
    checksum = next(iter(checksums.values()))
    if announced not in ("", checksum):
        raise DataLoss(f"checksum of what was pushed is {checksum}, the sender has {announced}")
    return staged, checksum
