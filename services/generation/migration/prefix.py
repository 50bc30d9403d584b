"""A move by prefix: the donor ends the sample, and whoever asked for it resumes it on the receiver.

Nothing but tokens goes over, and the caller has those already. The receiver computes the KV anew, in one step for
all of them: with short contexts that is sooner done than sending it.
"""

from __future__ import annotations

from paceline.internal.v1 import migration_pb2 as pb
from services.generation.migration.place import Place, leaving
from services.generation.migration.reason import NotMoved, Reason
from services.generation.samples import WorkStream


def hand_back(place: Place, request: pb.MoveRequest, report: pb.Migration) -> None:
    """In the engine thread: end a sample here, and tell its stream where it is to go on.

    Raises:
        NotMoved: it may not leave, or there is none.
    """
    loop = place.loop
    sample = leaving(loop, request.key)
    stream = sample.stream
    if not isinstance(stream, WorkStream):
        raise NotMoved(Reason.IN_TRANSIT, "the sample is not claimed yet")
    report.response_tokens = len(sample.response)
    finished = sample.finished(None, loop.now)
    finished.resume_on = request.receiver_id
    loop.release(request.key)
    stream.finish(sample, finished)
    loop.flush()
    report.state, report.outcome = pb.MIGRATION_STATE_COMMITTED, pb.MOVE_OUTCOME_MOVED
