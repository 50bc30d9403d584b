"""The way to the bubble coordinator: found in the registry, and never waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import structlog

from paceline.internal.v1 import bubble_pb2_grpc
from services.gateway.config import GatewayConfig
from services.platform.channel import open_channel
from services.platform.registry import InstanceRecord, Registry
from services.platform.tasks import is_cancelled

log = structlog.get_logger(__name__)

SERVICE = "bubbles"
# Seconds between looks into the registry, and the deadline of a call.
_LOOK, _CALL = 0.5, 1.0
# Pause after a call that failed, doubling with each in a row.
_PAUSE, _PAUSE_MOST = 0.1, 2.0
# Answers by which the coordinator says that the request is at fault, not itself.
_REFUSALS = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)


class Refused(Exception):
    """The coordinator will not have this request, now or later."""


class Coordinator:
    """The coordinator that registered last. `connections` counts how often one was connected to; `found` is
    called each time."""

    def __init__(self, config: GatewayConfig, registry: Registry, found: Callable[[], None]) -> None:
        self.connections = 0
        self._config = config
        self._registry = registry
        self._found = found
        self._record: InstanceRecord | None = None
        self._channel: grpc.aio.Channel | None = None
        self._stub: Any = None
        self._failures = 0
        self._retry_at = 0.0
        self._loop = asyncio.get_running_loop()

    async def run(self) -> None:
        """Keeps a connection to it until cancelled."""
        try:
            await self._registry.watch(SERVICE, _LOOK, self._look)
        finally:
            await self._disconnect()

    async def call(self, method: str, request: Any, seconds: float = _CALL) -> Any | None:
        """The answer, or None when there is none: no coordinator, or one that does not answer in time.
        Refused when it refuses the request."""
        stub = self._stub
        if stub is None:
            return None
        try:
            response = await getattr(stub, method)(request, timeout=seconds)
        except grpc.aio.AioRpcError as error:
            if error.code() in _REFUSALS:
                raise Refused(f"{error.code().name}: {error.details()}") from error
            hurried = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and seconds < _CALL
            if stub is self._stub and not hurried:
                await self._failed(f"{error.code().name}: {error.details()}")
            return None
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            # Not the caller was cancelled, but the channel was closed under the call.
            return None
        self._failures = 0
        return response

    async def _look(self, records: dict[str, InstanceRecord] | None) -> None:
        known, found = self._record, (records or {}).values()
        # One that is not registered any more is tried all the same: perhaps only the registry is away.
        youngest = max(found, key=lambda each: (each.registered_at, each.instance_id), default=known)
        if youngest is None:
            return
        if known is None or (youngest.instance_id, youngest.epoch) != (known.instance_id, known.epoch):
            await self._disconnect()
            self._record, self._failures, self._retry_at = youngest, 0, 0.0
        if self._stub is None and self._loop.time() >= self._retry_at:
            self._connect(youngest)

    def _connect(self, record: InstanceRecord) -> None:
        try:
            self._channel = open_channel(record.address, self._config)
        except ValueError as error:
            # The token may not go there: a mistake in the configuration, which stays one.
            self._retry_at = self._loop.time() + 60.0
            log.error("coordinator_not_dialled", address=record.address, error=str(error))
            return
        self._stub = bubble_pb2_grpc.BubbleServiceStub(self._channel)
        self.connections += 1
        self._found()

    async def _failed(self, reason: str) -> None:
        if self._failures == 0:
            assert self._record is not None, "a call was made"
            log.warning("coordinator_unreachable", address=self._record.address, reason=reason)
        self._retry_at = self._loop.time() + min(_PAUSE * 2 ** min(self._failures, 16), _PAUSE_MOST)
        self._failures += 1
        # A channel that failed waits ever longer before it tries again; a new one does not.
        await self._disconnect()

    async def _disconnect(self) -> None:
        channel, self._channel, self._stub = self._channel, None, None
        if channel is not None:
            await channel.close()
