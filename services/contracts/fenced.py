"""Run Redis scripts as the holder of a lease, so that a former leader cannot overwrite its successor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from services.contracts.errors import Unavailable

# Prefix of every script: KEYS[1] is the lease and ARGV[1] the term of the caller.
_FENCE = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return redis.error_reply('FENCED the lease belongs to ' .. holder) end
"""


class FencedScripts:
    """Runs scripts as the leader of `term` while it holds the lease; `who` names the service in errors."""

    def __init__(self, redis: Redis, lease: str, term: int, who: str) -> None:
        self._redis: Any = redis
        self._lease = lease
        self._term = str(term)
        self._who = who

    async def run(self, script: str, keys: Sequence[str], *arguments: str | int) -> Any:
        """Run a script with KEYS = (lease, *keys) and ARGV = (term, *arguments).

        Raises:
            Unavailable: another process holds the lease.
            RedisError: Redis cannot be reached.
        """
        every = (self._lease, *keys)
        try:
            return await self._redis.eval(
                _FENCE + script, len(every), *every, self._term, *map(str, arguments)
            )
        except ResponseError as error:
            if "FENCED" not in str(error):
                raise
            raise Unavailable(f"another {self._who} leads") from error
