"""Version of the online drafter that is published, as the gateway tells it to trainers."""

import asyncio

import structlog
from redis.asyncio import Redis

from services.contracts.drafter.record import read_published
from services.platform.redis.connection import OUTAGES
from services.platform.tasks import is_cancelled

log = structlog.get_logger(__name__)

# Seconds between readings.
_LOOK = 1.0


class PublishedDrafterVersion:
    """Version that Redis last had; 0 if none is published. `run` reads it, also where no learner is or is fed."""

    def __init__(self, redis: Redis, namespace: str) -> None:
        self.value = 0
        self._redis = redis
        self._namespace = namespace

    async def run(self) -> None:
        """Read until cancelled; in an outage of Redis what was read last stays."""
        while not is_cancelled():
            try:
                published = await read_published(self._redis, self._namespace)
                self.value = published.version if published is not None else 0
            except OUTAGES as error:
                log.debug("drafter_version_unreadable", error=str(error))
            await asyncio.sleep(_LOOK)
