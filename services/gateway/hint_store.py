"""Hints and where their runs stand, as Redis has them: what a restart of the gateway must not forget.

What is lost here costs idle time only, so nothing is fenced, and what cannot be written is written later or
never.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from redis.asyncio import Redis

from paceline.v1 import rollout_pb2
from services.gateway.keys import GatewayKeys

# Field of the step that began last; all other fields are steps.
_BEGUN = "begun"


@dataclass(slots=True)
class StoredRun:
    """What is stored of one run: the step that began last and its policy version, and hints."""

    run_id: str
    begun: tuple[int, int] | None = None
    hints: list[rollout_pb2.HintNextBatchRequest] = field(default_factory=list)


class HintStore:
    """One hash for each run, which expires when nothing is written for `seconds`. Methods raise what Redis
    raises, and may be repeated."""

    def __init__(self, redis: Redis, namespace: str, seconds: float) -> None:
        self._redis: Any = redis
        self._keys = GatewayKeys(namespace)
        self._seconds = max(1, int(seconds))

    async def put(self, request: rollout_pb2.HintNextBatchRequest) -> None:
        """Records a hint, in place of an earlier one for its step."""
        await self._write(request.run_id, {str(request.step): request.SerializeToString()}, ())

    async def begin(self, run_id: str, begun: tuple[int, int] | None, dropped: Iterable[int]) -> None:
        """Records which step of the run began last, with which version, and removes hints."""
        values = {} if begun is None else {_BEGUN: f"{begun[0]}:{begun[1]}"}
        await self._write(run_id, values, dropped)

    async def forget(self, run_id: str) -> None:
        """Removes all of a run."""
        pipe = self._redis.pipeline(transaction=False)
        pipe.delete(self._keys.hints(run_id))
        pipe.srem(self._keys.hinted, run_id)
        await pipe.execute()

    async def load(self) -> list[StoredRun]:
        """All runs. Those that have expired are taken off the list."""
        found = []
        for name in sorted(await self._redis.smembers(self._keys.hinted)):
            run_id = name.decode()
            stored = await self._redis.hgetall(self._keys.hints(run_id))
            if stored:
                found.append(_read(run_id, stored))
            else:
                await self._redis.srem(self._keys.hinted, run_id)
        return found

    async def _write(self, run_id: str, values: dict[str, Any], dropped: Iterable[int]) -> None:
        key = self._keys.hints(run_id)
        pipe = self._redis.pipeline(transaction=False)
        # Listed first: what is stored but not listed would never be found.
        pipe.sadd(self._keys.hinted, run_id)
        if values:
            pipe.hset(key, mapping=values)
        if steps := [str(step) for step in dropped]:
            pipe.hdel(key, *steps)
        pipe.expire(key, self._seconds)
        await pipe.execute()


def _read(run_id: str, stored: dict[bytes, bytes]) -> StoredRun:
    run = StoredRun(run_id)
    for name, value in stored.items():
        if name.decode() == _BEGUN:
            step, version = value.decode().split(":")
            run.begun = int(step), int(version)
        else:
            run.hints.append(rollout_pb2.HintNextBatchRequest.FromString(value))
    return run
