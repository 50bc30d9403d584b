"""A lease in Redis that makes one of several processes the one that acts."""

from __future__ import annotations

import asyncio
from typing import Any

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from services.platform.metrics import redis_up
from services.platform.store import OUTAGES

log = structlog.get_logger(__name__)

# KEYS: lease. ARGV: token, milliseconds. Takes a free lease, renews an own one. Returns the holder.
_TAKE = """
local holder = redis.call('GET', KEYS[1])
if not holder or holder == ARGV[1] then
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
  return ARGV[1]
end
return holder
"""

# KEYS: lease. ARGV: token.
_RELEASE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""


class Lease:
    """Held by one `token` at a time, for `seconds` after its last renewal.

    While Redis cannot be reached nobody else can take the lease, so its holder goes on. What must not be written
    by two holders at once has to be checked against the lease by whoever writes it.
    """

    def __init__(self, redis: Redis, key: str, token: str, seconds: float) -> None:
        self._redis: Any = redis
        self._key = key
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
            await self._redis.eval(_RELEASE, 1, self._key, self.token)
        except RedisError as error:
            log.warning("lease_not_released", error=str(error))

    async def _try(self) -> str:
        try:
            holder = await self._redis.eval(_TAKE, 1, self._key, self.token, int(self._seconds * 1000))
        except OUTAGES as error:
            log.warning("lease_unreachable", error=str(error))
            redis_up().set(0)
            return ""
        redis_up().set(1)
        return str(holder.decode())
