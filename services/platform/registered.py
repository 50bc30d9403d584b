"""A server that other services find in the registry, and what its process does beside it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from prometheus_client import CollectorRegistry
from redis.asyncio import Redis
from redis.exceptions import RedisError

from services.platform.config import ServiceConfig
from services.platform.registry import InstanceRecord, Registration
from services.platform.server import GrpcServer
from services.platform.store import OUTAGES, Keys, connect
from services.platform.tasks import until_one_ends

LEADING, STANDBY = "serving", "standby"
"""States of a record. A standby is as healthy as the leader."""


class RegisteredServer:
    """Usage: add servicers to `server.server` and work to `work`; `start`, then `run` until it is cancelled, then
    `stop`."""

    def __init__(
        self,
        config: ServiceConfig,
        service: str,
        instance_id: str,
        *,
        metrics_port: int = 0,
        registry: CollectorRegistry | None = None,
        state: str = LEADING,
    ) -> None:
        """`service` and `instance_id` are its names in the registry, `state` what its record says first."""
        self.server = GrpcServer(config, service=service, registry=registry)
        self.redis: Redis = connect(config)
        self.work: list[Callable[[], Coroutine[Any, Any, None]]] = []
        self._keys = Keys(config.namespace)
        self._record = InstanceRecord(service=service, instance_id=instance_id, state=state)
        self._metrics_port = metrics_port
        self._registration: Registration | None = None

    @property
    def address(self) -> str:
        """ "host:port" as peers dial it, once started."""
        return self.server.address

    async def start(self) -> None:
        """Opens the port and registers. Raises when Redis cannot be reached."""
        await self.server.start()
        record = replace(
            self._record,
            address=self.address,
            metrics_address=f"{self.address.rpartition(':')[0]}:{self._metrics_port}",
        )
        self._registration = Registration(self.redis, self._keys, record)
        await self._registration.register()
        await self.server.set_serving(True)

    async def run(self) -> None:
        """Sends heartbeats and works, until cancelled or some of the work ends.

        Raises what the work raises, and FailedPrecondition when another process has registered under the name.
        """
        assert self._registration is not None, "it was started"
        works = (self._registration.run, *self.work)
        await until_one_ends([asyncio.create_task(work()) for work in works])

    async def tell(self, state: str) -> None:
        """Changes the state of the record, now or with a later heartbeat."""
        if self._registration is not None:
            with contextlib.suppress(RedisError):
                await self._registration.update(state=state)

    async def stop(self, grace: float) -> None:
        """Leaves the registry and closes the port."""
        await self.server.set_serving(False)
        if self._registration is not None:
            with contextlib.suppress(*OUTAGES):
                await self._registration.deregister()
        await self.server.stop(grace)
        await self.redis.aclose()
