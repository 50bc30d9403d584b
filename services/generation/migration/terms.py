"""Whether a sample can leave, and whether one that is offered is taken. Pure, but for what it is given."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.internal.v1 import migration_pb2 as pb
from services.generation.migration.reason import NotMoved, Reason
from services.generation.migration.store import Geometry

# A reservation has room for so many tokens more than there are, for a share of those there are (the longer the
# sample, the longer it takes to send), and for what the sample gets in so many seconds.
_SLACK_TOKENS = 64
_SLACK_SHARE = 8
_SLACK_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class Limits:
    """Times in seconds, counts of samples, bytes; as `GenerationConfig` has them."""

    timeout: float = 10.0
    stall: float = 2.0
    claim: float = 10.0
    outgoing: int = 4
    incoming: int = 8
    chunk_bytes: int = 8 << 20


def geometry_of(
    kv: Geometry, model: str, vocab_size: int, ranks: int, transport: str = "tcp"
) -> pb.KvGeometry:
    """What both sides must have in common."""
    return pb.KvGeometry(
        model=model,
        vocab_size=vocab_size,
        block_size=kv.block_size,
        dtype=kv.dtype,
        layers=kv.layers,
        layout=kv.layout,
        block_bytes=kv.block_bytes,
        tensor_parallel=ranks,
        transport=transport,
    )


def check_geometry(own: pb.KvGeometry, offered: pb.KvGeometry) -> None:
    """NotMoved where KV does not mean the same; says what differs."""
    differing = [
        f"{field.name} is {getattr(offered, field.name)!r}, here {getattr(own, field.name)!r}"
        for field in pb.KvGeometry.DESCRIPTOR.fields
        if getattr(own, field.name) != getattr(offered, field.name)
    ]
    if differing:
        raise NotMoved(Reason.GEOMETRY, "; ".join(differing))


def capacity_of(tokens: int, most: int, rate: float = 0.0) -> int:
    """Tokens to reserve room for, for a sample that has `tokens`, can get `most`, prompt included, and gets `rate`
    a second. What of them it does not need for the move it needs afterwards."""
    slack = _SLACK_TOKENS + tokens // _SLACK_SHARE + int(_SLACK_SECONDS * rate)
    return min(tokens + slack, most)
