"""Where a move begins: the instance, and which of its samples may leave."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from paceline.internal.v1 import migration_pb2 as pb
from services.generation.engine.types import Verifier
from services.generation.loop import EngineLoop
from services.generation.migration.engine import MigrationEngine
from services.generation.migration.ports import Ports
from services.generation.migration.reason import NotMoved, Reason
from services.generation.migration.terms import Limits
from services.generation.samples import RunningSample, WorkStream


class ReceiverStub(Protocol):
    """What is used of `MigrationServiceStub`."""

    Reserve: Any
    Commit: Any
    Cancel: Any


@dataclass(frozen=True, slots=True)
class Place:
    """What a move needs of the instance that it begins at."""

    instance_id: str
    loop: EngineLoop
    engine: MigrationEngine
    ports: Ports
    geometry: pb.KvGeometry
    limits: Limits
    max_model_len: int


def leaving(loop: EngineLoop, key: str) -> RunningSample:
    """The sample that a key names, if it may leave. In the engine thread.

    Raises:
        NotMoved: it may not, or there is none.
    """
    sample = loop.samples.get(key)
    if sample is None or key in loop.background:
        raise NotMoved(Reason.UNKNOWN_SAMPLE, f"there is no sample {key!r}")
    if key in loop.watchers or not isinstance(sample.stream, WorkStream):
        raise NotMoved(Reason.IN_TRANSIT, "the sample is being moved, or not claimed yet")
    if key in loop.drafts.reuse:
        raise NotMoved(Reason.REUSING, "the sample is still taking over a cached rollout")
    if sample.request.verifier is Verifier.LENIENT and sample.started is None:
        raise NotMoved(Reason.NOT_DECODING, "the sample has not begun")
    return sample
