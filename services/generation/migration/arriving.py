"""Sample that migrates to this instance, as the reservation describes it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from paceline.internal.v1 import migration_pb2 as pb
from services.contracts import rollout_messages as convert
from services.contracts.errors import InvalidArgument, ServiceError
from services.contracts.rollout import StoredRollout
from services.contracts.sampling import check_tokens
from services.generation.engine.types import EngineRequest
from services.generation.kv_transfer.reason import NotMoved, Reason
from services.generation.loop.engine_loop import EngineLoop
from services.generation.loop.samples import RunningSample
from services.generation.loop.work_items import AdmissionTerms, check_item
from services.generation.migration.unclaimed import Unclaimed
from services.generation.rollouts.origin import Origin


@dataclass(slots=True)
class ArrivingSample:
    """Sample for which blocks are reserved."""

    request: EngineRequest
    origin: Origin
    rollout: StoredRollout | None
    migrations: int
    trace_parent: str
    streamed: bool
    # The running sample, once its drafters have begun.
    sample: RunningSample | None = None
    stream: Unclaimed = field(default_factory=Unclaimed)

    @classmethod
    def of(cls, asked: pb.ReserveRequest, terms: AdmissionTerms, loop: EngineLoop) -> ArrivingSample:
        """Return the sample of a request. NotMoved when it cannot be taken."""
        try:
            request = check_item(asked.item, terms, (), loop.next_sample_id)
            if violations := check_tokens(
                asked.cached_token_ids, terms.limits, "cached_token_ids", allow_empty=True
            ):
                raise InvalidArgument(violations)
            rollout = convert.from_proto(asked.rollout) if asked.HasField("rollout") else None
        except ServiceError as error:
            raise NotMoved(Reason.INVALID, error.message) from error
        if asked.cached_token_ids:
            request = replace(request, cached=tuple(asked.cached_token_ids))
        origin, trace = Origin.of(asked.item), asked.item.trace_parent
        return cls(request, origin, rollout, asked.migrations, trace, asked.item.streamed)
