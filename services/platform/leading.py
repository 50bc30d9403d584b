"""Server of a service of which one process leads.

It is apart from `service`: only services with a leader are granted the commands of Redis that a lease needs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, Gauge

from services.platform.config import LeaderConfig
from services.platform.redis.leadership import Leadership, Term
from services.platform.service import LEADING, STANDBY, RegisteredServer

T = TypeVar("T", bound=Term)


class LeadingServer(RegisteredServer, Generic[T]):
    """Server of a service of which one process leads; its record says whether it leads or is a standby.

    Usage as of `RegisteredServer`: `start`, then `run` until cancelled, then `stop`.
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
            service: name of the service in the registry.
            instance_id: name of this process in the registry.
            title: name of the service for users.
            lease: Redis key of the lease.
            open_term: makes the leader's work for a term, whose number fences its writes.
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
        await self.set_state(LEADING if leading else STANDBY)
