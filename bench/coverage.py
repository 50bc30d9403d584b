"""Asks the bubble coordinator how much of a coming step is pre-generated."""

from __future__ import annotations

from typing import Self

import grpc

from paceline.internal.v1 import bubble_pb2 as pb
from paceline.internal.v1 import bubble_pb2_grpc as rpc
from paceline.transport.channel import call_metadata
from services.local import Platform, PlatformError

_TIMEOUT = 10.0


class Coverage:
    """A connection to the coordinator of a platform that is up, from `__enter__` to `__exit__`."""

    def __init__(self, platform: Platform) -> None:
        ready = platform.process("bubbles").ready
        if ready is None:
            raise PlatformError("the bubble coordinator is not ready")
        self._channel = grpc.insecure_channel(ready.address)
        self._metadata = call_metadata(platform.config.token)
        self._stub = rpc.BubbleServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def __call__(self, run_id: str, step: int) -> tuple[int, ...]:
        """Return the tokens of each sample of the step that has any."""
        request = pb.GetCoverageRequest(run_id=run_id, step=step)
        answer = self._stub.GetCoverage(request, timeout=_TIMEOUT, metadata=self._metadata)
        return tuple(slot.tokens for slot in answer.slots if slot.tokens)
