"""Calls to whichever process of another service leads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from services.gateway.config import GatewayConfig
from services.platform.channel import open_channel
from services.platform.errors import ServiceError, Unavailable
from services.platform.registered import LEADING
from services.platform.registry import InstanceRecord, Registry
from services.platform.store import OUTAGES

_STATUS_KEY = "grpc-status-details-bin"


class Leader:
    """Found anew for each call, so for what is seldom asked for."""

    def __init__(
        self,
        config: GatewayConfig,
        registry: Registry,
        service: str,
        stub: Callable[[grpc.aio.Channel], Any],
        without: str,
    ) -> None:
        """`service` is its name in the registry, `stub` makes a stub on a channel, and `without` says what goes on
        while none leads."""
        self._config = config
        self._registry = registry
        self._service = service
        self._stub = stub
        self._without = without

    async def call(self, method: str, request: Message, seconds: float) -> Any:
        """The leader's answer.

        Raises:
            Unavailable: none leads, or it cannot be called.
            ServiceError: it refused, with its code and details.
        """
        record = await self._find()
        try:
            async with open_channel(record.address, self._config) as channel:
                return await getattr(self._stub(channel), method)(request, timeout=seconds)
        except ValueError as error:
            # The token may not go there.
            raise Unavailable(f"the {self._service} service cannot be called: {error}") from error
        except grpc.aio.AioRpcError as error:
            raise _translated(error) from error

    async def _find(self) -> InstanceRecord:
        try:
            records = await self._registry.list(self._service)
        except OUTAGES as error:
            raise Unavailable(f"the {self._service} service cannot be looked up: {error}") from error
        leaders = [record for record in records.values() if record.state == LEADING]
        if not leaders:
            raise Unavailable(f"no {self._service} service is running; {self._without}")
        return max(leaders, key=lambda each: (each.registered_at, each.instance_id))


def _translated(error: grpc.aio.AioRpcError) -> ServiceError:
    """What the service answered, with its details, as this gateway's own answer."""
    details = []
    for key, value in error.trailing_metadata() or ():
        if key == _STATUS_KEY and isinstance(value, bytes):
            details = _unpacked(status_pb2.Status.FromString(value))
    return ServiceError(error.details() or error.code().name, *details, code=error.code())


def _unpacked(status: status_pb2.Status) -> list[Message]:
    found: list[Message] = []
    for packed in status.details:
        kind = getattr(error_details_pb2, packed.TypeName().rpartition(".")[2], None)
        if kind is not None:
            found.append(kind.FromString(packed.value))
    return found
