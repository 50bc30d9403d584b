"""Connection of an instance to the coordinator of bubbles."""

from __future__ import annotations

import grpc
import structlog

from paceline.internal.v1 import bubble_pb2 as pb
from paceline.internal.v1 import bubble_pb2_grpc as rpc
from services.platform.config.settings import ServiceConfig
from services.platform.grpc.channel import open_channel
from services.platform.redis.connection import OUTAGES
from services.platform.redis.registry import Registry

_log = structlog.get_logger(__name__)

SERVICE = "bubbles"
"""Name of the coordinator in the registry."""


class CoordinatorGone(Exception):
    """No coordinator is registered, or it does not answer; the message says which."""


class CoordinatorConnection:
    """Connection to the registered coordinator; dropped at a failure, and found anew."""

    def __init__(self, config: ServiceConfig, registry: Registry) -> None:
        self._config = config
        self._registry = registry
        self._channel: grpc.aio.Channel | None = None

    async def find(self) -> None:
        """Connect to the coordinator that registered last, unless connected.

        Raises:
            CoordinatorGone: none is registered, or the registry cannot be read.
        """
        if self._channel is not None:
            return
        try:
            records = await self._registry.list(SERVICE)
        except OUTAGES as error:
            raise CoordinatorGone(f"the registry cannot be read: {error}") from error
        if not records:
            raise CoordinatorGone("none is registered")
        record = max(records.values(), key=lambda each: each.registered_at)
        try:
            self._channel = open_channel(record.address, self._config)
        except ValueError as error:
            raise CoordinatorGone(str(error)) from error
        _log.info("coordinator_found", coordinator=record.instance_id, address=record.address)

    async def poll(self, request: pb.PollWorkRequest, seconds: float) -> pb.PollWorkResponse:
        """Poll the coordinator that was found; waits at most `seconds`.

        Raises:
            CoordinatorGone: it did not answer, or with an error.
        """
        assert self._channel is not None, "a coordinator is found before it is polled"
        stub = rpc.BubbleServiceStub(self._channel)
        try:
            answer: pb.PollWorkResponse = await stub.PollWork(request, timeout=seconds)
        except grpc.aio.AioRpcError as error:
            raise CoordinatorGone(f"{error.code().name}: {error.details()}") from error
        return answer

    async def leave(self) -> None:
        """Close the connection."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()
