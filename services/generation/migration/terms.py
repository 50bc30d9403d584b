"""Geometry of KV, and room to reserve. Pure."""

from __future__ import annotations

from dataclasses import asdict

from paceline.internal.v1 import migration_pb2 as pb
from services.generation.kv_transfer.block_store import Geometry
from services.generation.kv_transfer.reason import NotMoved, Reason

# Room of a reservation beyond the present tokens: a constant, one eighth of the tokens (a longer sample takes
# longer to send), and the tokens that the sample generates in this many seconds.
_SLACK_TOKENS = 64
_SLACK_SHARE = 8
_SLACK_SECONDS = 0.25


def geometry_of(
    kv: Geometry, model: str, vocab_size: int, ranks: int, transport: str = "tcp"
) -> pb.KvGeometry:
    """Build the geometry that donor and receiver must have in common."""
    return pb.KvGeometry(
        model=model, vocab_size=vocab_size, tensor_parallel=ranks, transport=transport, **asdict(kv)
    )


def check_geometry(own: pb.KvGeometry, offered: pb.KvGeometry) -> None:
    """Raise NotMoved if the KV of two instances is incompatible; the message says what differs."""
    differing = [
        f"{field.name} is {getattr(offered, field.name)!r}, here {getattr(own, field.name)!r}"
        for field in pb.KvGeometry.DESCRIPTOR.fields
        if getattr(own, field.name) != getattr(offered, field.name)
    ]
    if differing:
        raise NotMoved(Reason.GEOMETRY, "; ".join(differing))


def capacity_of(tokens: int, most: int, rate: float = 0.0) -> int:
    """Return the tokens to reserve for a sample that has `tokens` and can get `most`, prompts included.

    `rate` is its tokens per second. Room that the move does not need is used afterwards.
    """
    slack = _SLACK_TOKENS + tokens // _SLACK_SHARE + int(_SLACK_SECONDS * rate)
    return min(tokens + slack, most)
