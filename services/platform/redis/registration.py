"""Registration of a process: a record in Redis that its heartbeat keeps alive."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import structlog
from redis.asyncio import Redis

from services.contracts.errors import FailedPrecondition
from services.platform.backoff import ExponentialBackoff
from services.platform.redis.connection import OUTAGES, Keys, Refused, show_outage
from services.platform.redis.registry import HEARTBEAT, InstanceRecord
from services.platform.tasks import is_cancelled

log = structlog.get_logger(__name__)

INDEX_KEEPS = 3600.0
"""Seconds that an id stays in the index without a heartbeat, far more than clocks can differ."""
# Seconds between tries in an outage of Redis: the first to register, the longest, and those of heartbeats.
_FIRST_DELAY, _LONGEST_DELAY, _SOON = 0.1, 2.0, 0.25

# KEYS: epoch counter, record, index. ARGV: epoch, record, ttl in ms, instance id, now, oldest to keep.
# Returns 0 if a later process has the id. A counter that Redis lost is restored.
_WRITE = """
local known = tonumber(redis.call('GET', KEYS[1]) or '0')
local mine = tonumber(ARGV[1])
if known > mine then return 0 end
if known < mine then redis.call('SET', KEYS[1], ARGV[1]) end
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
redis.call('ZADD', KEYS[3], ARGV[5], ARGV[4])
redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', ARGV[6])
return 1
"""

# KEYS as above. ARGV: epoch, ttl in ms. What a full Redis still takes: the record as it was last written stays.
_KEEP = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('PEXPIRE', KEYS[2], ARGV[2])
"""

# KEYS as above. ARGV: epoch, instance id. Leaves the record of a later process alone.
_REMOVE = """
if tonumber(redis.call('GET', KEYS[1]) or '0') > tonumber(ARGV[1]) then return 0 end
redis.call('DEL', KEYS[2])
redis.call('ZREM', KEYS[3], ARGV[2])
return 1
"""


class Registration:
    """Registration of one process.

    Usage: `await register()`, then `run()` in a task of its own until the end, then `await deregister()`.
    `ttl` (seconds) is how long the record outlives the last heartbeat, sent every `interval` seconds. `told` is
    called when Redis stops to take heartbeats, with False, and when it takes them again.
    """

    def __init__(
        self,
        store: Redis,
        keys: Keys,
        record: InstanceRecord,
        ttl: float = 3.0,
        interval: float = HEARTBEAT,
        told: Callable[[bool], Awaitable[None]] | None = None,
    ) -> None:
        self.record = record
        self.told = told
        self._store = store
        self._ttl_ms = round(ttl * 1000)
        self._interval = interval
        self._active = False
        self._reachable = True
        # Writes go out one at a time, so that an old record can never overwrite a newer one.
        self._lock = asyncio.Lock()
        service, instance_id = record.service, record.instance_id
        self._keys = (
            keys.epoch(service, instance_id),
            keys.registry(service, instance_id),
            keys.registry_index(service),
        )

    async def register(self) -> int:
        """Take the next epoch of the id, publish the record and return the epoch; wait for Redis in an outage."""
        backoff = ExponentialBackoff(_FIRST_DELAY, _LONGEST_DELAY)
        while True:
            try:
                epoch = int(await self._store.incr(self._keys[0]))
                self.record = replace(self.record, epoch=epoch, registered_at=time.time())
                self._active = True
                await self._write()
                break
            except OUTAGES as error:
                self._active = False
                await self._tell(error)
                await asyncio.sleep(backoff.failed())
        await self._tell(None)
        log.info("registered", instance_id=self.record.instance_id, epoch=epoch, address=self.record.address)
        return epoch

    async def update(self, **changes: Any) -> None:
        """Change fields of the record and publish it now, or after an outage of Redis with a later heartbeat."""
        self.record = replace(self.record, **changes)
        if self._active:
            await self._send_heartbeat()

    async def run(self) -> None:
        """Send heartbeats until cancelled; outlasts outages of Redis.

        Raises FailedPrecondition (SUPERSEDED) if another process has registered under the id, so that this one
        must end.
        """
        while self._active:
            await self._send_heartbeat()
            if is_cancelled():
                raise asyncio.CancelledError
            await asyncio.sleep(self.pause(self._interval))

    def pause(self, seconds: float) -> float:
        """Return the seconds until the next heartbeat: `seconds`, or less after one that Redis did not take."""
        return seconds if self._reachable else min(seconds, _SOON)

    async def deregister(self) -> None:
        """Remove the record at once. Raises errors of Redis; the record then expires by itself."""
        self._active = False
        async with self._lock:
            await self._eval(_REMOVE, str(self.record.epoch), self.record.instance_id)

    async def _send_heartbeat(self) -> None:
        try:
            await self._write()
        except OUTAGES as error:
            await self._tell(error)
            if isinstance(error, Refused):
                with suppress(*OUTAGES):
                    await self._eval(_KEEP, str(self.record.epoch), self._ttl_ms)
        else:
            await self._tell(None)

    async def _tell(self, error: Exception | None) -> None:
        """Show whether Redis took a heartbeat, and tell of a change."""
        show_outage(error)
        if self._reachable == (error is None):
            return
        self._reachable = error is None
        if error is not None:
            log.warning("heartbeat_failed", instance_id=self.record.instance_id, error=str(error))
        else:
            log.info("heartbeat_resumed", instance_id=self.record.instance_id)
        if self.told is not None:
            await self.told(self._reachable)

    async def _write(self) -> None:
        async with self._lock:
            if not self._active:
                return
            record, now = self.record, time.time()
            arguments = (record.to_json(), self._ttl_ms, record.instance_id, now, now - INDEX_KEEPS)
            kept = await self._eval(_WRITE, str(record.epoch), *arguments)
        if not kept:
            self._active = False
            raise FailedPrecondition(
                "SUPERSEDED",
                f"another process has registered as {record.instance_id!r} after epoch {record.epoch}",
                instance_id=record.instance_id,
            )

    async def _eval(self, script: str, *arguments: str | float) -> int:
        return int(await self._store.eval(script, len(self._keys), *self._keys, *map(str, arguments)))
