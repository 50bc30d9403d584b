"""Server that other services find in the registry, and the background work of its process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any, Generic, TypeVar

from prometheus_client import CollectorRegistry, Gauge
from redis.asyncio import Redis
from redis.exceptions import RedisError

from services.platform.config.settings import LeaderConfig, ServiceConfig
from services.platform.grpc.server import GrpcServer
from services.platform.redis.connection import OUTAGES, Keys, connect
from services.platform.redis.leadership import Leadership, Term
from services.platform.redis.registration import Registration
from services.platform.redis.registry import InstanceRecord
from services.platform.tasks import until_one_ends

LEADING, STANDBY = "serving", "standby"
"""States of a record. A standby is as healthy as the leader."""


class RegisteredServer:
    """A gRPC server with a registration and background work.

    Usage: add servicers to `server.server` and work to `work`; `start`, then `run` until cancelled, then `stop`.
    """

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
        """`service` and `instance_id` are its names in the registry, `state` is the first state of its record."""
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
        """Open the port and register, which waits for Redis in an outage; health is NOT_SERVING meanwhile."""
        await self.server.start()
        record = replace(
            self._record,
            address=self.address,
            metrics_address=f"{self.address.rpartition(':')[0]}:{self._metrics_port}",
        )
        self._registration = Registration(self.redis, self._keys, record, told=self.server.set_store)
        await self._registration.register()
        await self.server.set_serving(True)

    async def run(self) -> None:
        """Send heartbeats and do the work, until cancelled or some of the work ends.

        Raises the errors of the work, and FailedPrecondition if another process has registered under the name.
        """
        assert self._registration is not None, "it was started"
        works = (self._registration.run, *self.work)
        await until_one_ends([asyncio.create_task(work()) for work in works])

    async def tell(self, state: str) -> None:
        """Change the state of the record, now or with a later heartbeat."""
        if self._registration is not None:
            with contextlib.suppress(RedisError):
                await self._registration.update(state=state)

    async def stop(self, grace: float) -> None:
        """Leave the registry and close the port."""
        await self.server.set_serving(False)
        if self._registration is not None:
            with contextlib.suppress(*OUTAGES):
                await self._registration.deregister()
        await self.server.stop(grace)
        await self.redis.aclose()


T = TypeVar("T", bound=Term)


class LeadingServer(RegisteredServer, Generic[T]):
    """Process of a service of which one leads; its registration tells whether it leads or stands by.

    Usage as of `RegisteredServer`: `start`, then `run` until it is cancelled, then `stop`.
    """

    def __init__(
        self,
        config: LeaderConfig,
        service: str,
        instance_id: str,
        *,
        title: str,
        lease: str,
        open_term: Callable[[int], Awaitable[T]],
        leader: Gauge,
        registry: CollectorRegistry,
        metrics_port: int = 0,
    ) -> None:
        """Build the server of one process.

        Args:
            config: settings shared by all services that have a leader.
            service: its name in the registry.
            instance_id: name of this process in the registry.
            title: what users call the service.
            lease: Redis key of the lease.
            open_term: makes what leads; it gets the number of the term, which fences its writes.
            leader: set to 1 while this process leads.
            registry: registry of the server's metrics.
            metrics_port: port at which metrics are scraped.
        """
        super().__init__(
            config, service, instance_id, metrics_port=metrics_port, registry=registry, state=STANDBY
        )
        self._leader = leader
        self.leadership: Leadership[T] = Leadership(title, config, lease, open_term, self._changed)
        self.work.append(self.leadership.run)

    async def _changed(self, leading: bool) -> None:
        self._leader.set(leading)
        await self.tell(LEADING if leading else STANDBY)
