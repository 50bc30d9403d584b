"""Requests as the journal has them: as bytes, and with a digest that tells another one from the same again."""

import asyncio
import hashlib

from paceline.v1 import rollout_pb2 as pb

# Requests above this are serialised in a thread.
_LARGE_BYTES = 1 << 20


async def serialised(request: pb.SubmitRolloutsRequest) -> tuple[bytes, str]:
    """Return a request as bytes, and a digest of all its fields, which two under one batch id must share."""
    if request.ByteSize() < _LARGE_BYTES:
        return _serialise(request)
    return await asyncio.to_thread(_serialise, request)


def _serialise(request: pb.SubmitRolloutsRequest) -> tuple[bytes, str]:
    payload = request.SerializeToString(deterministic=True)
    return payload, hashlib.sha256(payload).hexdigest()


def merged(request: bytes, additions: list[bytes]) -> pb.SubmitRolloutsRequest:
    """Return a recorded request with the groups that were added to it."""
    # Protobuf appends what is repeated.
    return pb.SubmitRolloutsRequest.FromString(b"".join((request, *additions)))
