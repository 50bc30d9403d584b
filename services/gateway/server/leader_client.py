"""Calls to the leading process of another service."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import Message

from services.contracts.errors import Unavailable
from services.gateway.config import GatewayConfig
from services.gateway.connections.connection import received_error
from services.platform.grpc.channel import open_channel
from services.platform.redis.connection import OUTAGES
from services.platform.redis.registry import InstanceRecord, Registry
from services.platform.registered_server import LEADING


@dataclass(eq=False)
class LeaderClient:
    """Client that finds the leader anew for each call, so for what is seldom called.

    `service` is its name in the registry, `stub` makes a stub on a channel, and `without` says what goes on
    while none leads.
    """

    config: GatewayConfig
    registry: Registry
    service: str
    stub: Callable[[grpc.aio.Channel], Any]
    without: str

    async def call(self, method: str, request: Message, seconds: float) -> Any:
        """Return the leader's answer.

        Raises:
            Unavailable: none leads, or it cannot be called.
            ServiceError: it refused, with its code and details.
        """
        record = await self._find()
        try:
            async with open_channel(record.address, self.config) as channel:
                return await getattr(self.stub(channel), method)(request, timeout=seconds)
        except ValueError as error:
            # The token may not go there.
            raise Unavailable(f"the {self.service} service cannot be called: {error}") from error
        except grpc.aio.AioRpcError as error:
            raise received_error(error) from error

    async def _find(self) -> InstanceRecord:
        try:
            records = await self.registry.list(self.service)
        except OUTAGES as error:
            raise Unavailable(f"the {self.service} service cannot be looked up: {error}") from error
        leaders = [record for record in records.values() if record.state == LEADING]
        if not leaders:
            raise Unavailable(f"no {self.service} service is running; {self.without}")
        return max(leaders, key=lambda each: (each.registered_at, each.instance_id))
