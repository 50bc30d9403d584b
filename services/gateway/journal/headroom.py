"""Headroom of Redis: no new batch is accepted while its memory is nearly full, so that those in work can end."""

from __future__ import annotations

import asyncio
from typing import Any

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from services.contracts.errors import ResourceExhausted
from services.gateway.journal.backlog import JournalBacklog
from services.gateway.metrics import GatewayMetrics
from services.platform.tasks import is_cancelled

log = structlog.get_logger(__name__)

_PAUSE = 1.0
_RETRY_AFTER = 5.0


def used_share(info: dict[str, Any]) -> float:
    """Return used memory over `maxmemory` from the reply to INFO memory; 0 where there is no limit.

    A cluster replies for each node: then it is the share of the fullest.
    """
    nodes = [each for each in info.values() if isinstance(each, dict)] or [info]
    limited = [(int(node.get("used_memory", 0)), int(node.get("maxmemory", 0))) for node in nodes]
    return max((used / most for used, most in limited if most), default=0.0)


class RedisHeadroom:
    """Used share of Redis' memory, read every second by `run`.

    Batches are refused above `most`, and while `backlog` is paused.
    """

    def __init__(self, redis: Redis, most: float, backlog: JournalBacklog, metrics: GatewayMetrics) -> None:
        self._redis: Any = redis
        self._most = most
        self._backlog = backlog
        self._metrics = metrics
        self._share = 0.0

    def check(self) -> None:
        """Check that there is room for another batch. ResourceExhausted if there is not."""
        self._backlog.check()
        if self._share > self._most:
            raise ResourceExhausted(
                "redis_memory",
                f"Redis uses {self._share:.0%} of its memory; new batches are accepted below {self._most:.0%}. "
                "Acknowledged samples leave it",
                retry_after=_RETRY_AFTER,
            )

    async def look(self) -> None:
        """Read the used share once. Raises what Redis raises."""
        self._share = used_share(await self._redis.info("memory"))
        self._metrics.redis_memory.set(self._share)

    async def run(self) -> None:
        """Read until cancelled."""
        while not is_cancelled():
            try:
                await self.look()
            except RedisError as error:
                log.debug("memory_unknown", error=str(error))
            await asyncio.sleep(_PAUSE)
