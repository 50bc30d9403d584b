"""Reader of the feed, the only consumer of its group.

The next leader reads entries again that were read but not acknowledged, before all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import structlog
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from services.contracts.fenced import FencedScripts
from services.contracts.learner import CONSUMER, GROUP, DrafterKeys, Fed, decode_entry

log = structlog.get_logger(__name__)

# Below the timeout of Redis commands.
_BLOCK_MS, _BATCH = 500, 128
_MAX_ACKNOWLEDGED = 500

# KEYS: lease, feed. ARGV: term, group, ids. An acknowledged entry has no other reader, so it is deleted.
_ACKNOWLEDGE = """
local ids = {}
for at = 3, #ARGV do ids[#ids + 1] = ARGV[at] end
if redis.call('EXISTS', KEYS[2]) == 0 then return 0 end
redis.call('XACK', KEYS[2], ARGV[2], unpack(ids))
return redis.call('XDEL', KEYS[2], unpack(ids))
"""


class FeedReader:
    """Reads the feed for one term. `lost` counts entries that the stream's bound removed before they were read."""

    def __init__(self, redis: Redis, namespace: str, term: int) -> None:
        self.lost = 0
        self._redis: Any = redis
        self._feed = DrafterKeys(namespace).feed
        self._scripts = FencedScripts(redis, DrafterKeys(namespace).lease, term, "learner")
        # Position among the entries read before this term; None once all of them were read again.
        self._again: str | None = "0"

    async def read(self) -> list[tuple[str, Fed | None]]:
        """Return the next entries with their ids, None for an unreadable one. Raises Redis errors.

        Waits up to half a second for entries.
        """
        after = self._again if self._again is not None else ">"
        try:
            found = await self._redis.xreadgroup(
                GROUP, CONSUMER, {self._feed: after}, count=_BATCH, block=_BLOCK_MS
            )
        except ResponseError as error:
            if "NOGROUP" not in str(error):
                raise
            await self._create_group()
            return []
        entries = found[0][1] if found else []
        if self._again is not None:
            self._again = entries[-1][0].decode() if entries else None
        return [(entry_id.decode(), self._decoded(fields)) for entry_id, fields in entries]

    async def acknowledge(self, ids: Sequence[str]) -> None:
        """Delete entries that are part of a durable state or unusable.

        Raises Redis errors, and Unavailable when another process leads.
        """
        for begin in range(0, len(ids), _MAX_ACKNOWLEDGED):
            part = ids[begin : begin + _MAX_ACKNOWLEDGED]
            await self._scripts.run(_ACKNOWLEDGE, (self._feed,), GROUP, *part)

    async def backlog(self) -> int:
        """Return the number of entries in the stream. Raises Redis errors."""
        return int(await self._redis.xlen(self._feed))

    async def _create_group(self) -> None:
        """Create the consumer group, starting with the oldest entry of the stream."""
        try:
            await self._redis.xgroup_create(self._feed, GROUP, id="0", mkstream=True)
        except ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise
        self._again = "0"

    def _decoded(self, fields: Any) -> Fed | None:
        if not fields:
            # The stream's bound removed it while it was pending.
            self.lost += 1
            return None
        try:
            return decode_entry(fields)
        except ValueError as error:
            log.warning("feed_entry_unreadable", error=str(error))
            return None
