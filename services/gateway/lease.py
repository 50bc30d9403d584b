"""The lease in Redis that makes one gateway the leader."""

import asyncio
from typing import Any

import structlog
from redis.asyncio import Redis

from services.gateway import scripts
from services.gateway.keys import GatewayKeys
from services.platform.store import OUTAGES

log = structlog.get_logger(__name__)


class Lease:
    """Held by one `token` at a time, for `seconds` after its last renewal.

    While Redis cannot be reached nobody else can take the lease, so its holder goes on; what it writes
    is checked against the lease (or the owner of the batch) by the scripts themselves.
    """

    def __init__(self, redis: Redis, namespace: str, token: str, seconds: float) -> None:
        self._redis: Any = redis
        self._key = GatewayKeys(namespace).lease
        self.token = token
        self._seconds = seconds

    async def acquire(self) -> None:
        """Returns when the lease is ours."""
        told = ""
        while (holder := await self._try()) != self.token:
            if holder and holder != told:
                log.info("standing_by", leader=holder)
                told = holder
            await asyncio.sleep(self._seconds / 10)

    async def hold(self) -> str:
        """Renews the lease until somebody else has it; returns who."""
        while True:
            await asyncio.sleep(self._seconds / 4)
            holder = await self._try()
            if holder and holder != self.token:
                return holder

    async def release(self) -> None:
        """Lets a standby take over at once. If Redis is away, the lease ends by itself."""
        try:
            await self._redis.eval(scripts.RELEASE, 1, self._key, self.token)
        except OUTAGES as error:
            log.warning("lease_not_released", error=str(error))

    async def _try(self) -> str:
        try:
            holder = await self._redis.eval(
                scripts.LEASE, 1, self._key, self.token, int(self._seconds * 1000)
            )
        except OUTAGES as error:
            log.warning("lease_unreachable", error=str(error))
            return ""
        return str(holder.decode())
