"""Reads the feed as the one consumer of its group, and acknowledges what is part of a durable state.

What was read and not acknowledged comes again, first of all, to whoever leads next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import structlog
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from services.drafter.feed import Fed, decode
from services.drafter.keys import CONSUMER, GROUP, DrafterKeys
from services.platform.errors import Unavailable

log = structlog.get_logger(__name__)

# Below the command timeout of `store.connect`.
_BLOCK_MS, _BATCH = 500, 128
_MOST_ACKED = 500

# KEYS: lease, feed. ARGV: token, group, ids. Acknowledged entries are of no use to anybody: they go.
_ACK = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return redis.error_reply('FENCED the lease belongs to ' .. holder) end
local ids = {}
for at = 3, #ARGV do ids[#ids + 1] = ARGV[at] end
if redis.call('EXISTS', KEYS[2]) == 0 then return 0 end
redis.call('XACK', KEYS[2], ARGV[2], unpack(ids))
return redis.call('XDEL', KEYS[2], unpack(ids))
"""


class Intake:
    """`lost` counts entries that the bound of the stream took away before they were used."""

    def __init__(self, redis: Redis, namespace: str, token: str) -> None:
        self._redis: Any = redis
        self._keys = DrafterKeys(namespace)
        self._token = token
        # Where to go on among what was read before; None: all of that is here.
        self._again: str | None = "0"
        self.lost = 0

    async def read(self) -> list[tuple[str, Fed | None]]:
        """The next entries with their ids, None for one that is none of ours; waits a moment for some. Raises what
        Redis raises."""
        after = self._again if self._again is not None else ">"
        try:
            found = await self._redis.xreadgroup(
                GROUP, CONSUMER, {self._keys.feed: after}, count=_BATCH, block=_BLOCK_MS
            )
        except ResponseError as error:
            if "NOGROUP" not in str(error):
                raise
            await self._create()
            return []
        entries = found[0][1] if found else []
        if self._again is not None:
            self._again = entries[-1][0].decode() if entries else None
        return [(entry_id.decode(), self._parsed(fields)) for entry_id, fields in entries]

    async def ack(self, ids: Sequence[str]) -> None:
        """They are part of a durable state, or of no use. Raises what Redis raises, and Unavailable when another
        process leads."""
        for begin in range(0, len(ids), _MOST_ACKED):
            part = ids[begin : begin + _MOST_ACKED]
            try:
                await self._redis.eval(_ACK, 2, self._keys.lease, self._keys.feed, self._token, GROUP, *part)
            except ResponseError as error:
                if "FENCED" not in str(error):
                    raise
                raise Unavailable("another learner leads") from error

    async def backlog(self) -> int:
        """Entries in the stream. Raises what Redis raises."""
        return int(await self._redis.xlen(self._keys.feed))

    async def _create(self) -> None:
        """Begins with all that the stream has."""
        try:
            await self._redis.xgroup_create(self._keys.feed, GROUP, id="0", mkstream=True)
        except ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise
        self._again = "0"

    def _parsed(self, fields: Any) -> Fed | None:
        if not fields:
            # It was pending, and the bound of the stream has taken it.
            self.lost += 1
            return None
        try:
            return decode(fields)
        except ValueError as error:
            log.warning("feed_entry_unreadable", error=str(error))
            return None
