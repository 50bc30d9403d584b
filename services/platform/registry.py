"""Who is alive: every process keeps a record in Redis that expires when its heartbeat stops."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, NoReturn

import structlog
from redis.asyncio import Redis

from services.platform.errors import FailedPrecondition
from services.platform.metrics import redis_up
from services.platform.store import OUTAGES, Keys
from services.platform.tasks import is_cancelled

log = structlog.get_logger(__name__)

INSTANCES = "generation"
"""The service that generation instances are registered under."""
INDEX_KEEPS = 3600.0
"""Seconds that an id stays in the index without a heartbeat: far more than clocks can differ."""

# KEYS: epoch counter, record, index. ARGV: epoch, record, ttl in ms, instance id, now, oldest to keep.
# Answers 0 when a younger process has the id. A counter that Redis lost is set up again.
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

# KEYS as above. ARGV: epoch, instance id. Leaves a younger process's record alone.
_REMOVE = """
if tonumber(redis.call('GET', KEYS[1]) or '0') > tonumber(ARGV[1]) then return 0 end
redis.call('DEL', KEYS[2])
redis.call('ZREM', KEYS[3], ARGV[2])
return 1
"""


@dataclass(frozen=True, slots=True)
class InstanceRecord:
    """What a process says of itself. `registered_at` is in unix seconds; addresses are "host:port"."""

    service: str
    instance_id: str
    epoch: int = 0
    address: str = ""
    metrics_address: str = ""
    state: str = ""
    policy_version: int = 0
    load: dict[str, Any] = field(default_factory=dict)
    max_running: int = 0
    max_model_len: int = 0
    vocab_size: int = 0
    model: str = ""
    device: str = ""
    registered_at: float = 0.0

    @property
    def samples(self) -> int:
        """Samples of a step that an instance has, running or waiting."""
        return int(self.load.get("running", 0)) + int(self.load.get("waiting", 0))

    def to_json(self) -> str:
        """The record as one JSON object."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> InstanceRecord:
        """Reads `to_json`; fields of a later version are ignored. ValueError when it is no record."""
        values = json.loads(text)
        if not isinstance(values, dict) or not {"service", "instance_id"} <= values.keys():
            raise ValueError("not an instance record")
        known = {each.name for each in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})


class Registration:
    """Keeps one process registered.

    Usage: `await register()`, then `run()` in a task of its own until the end, then `await deregister()`.
    `ttl` (seconds) is how long the record outlives the last heartbeat, sent every `interval` seconds.
    """

    def __init__(
        self, store: Redis, keys: Keys, record: InstanceRecord, ttl: float = 3.0, interval: float = 1.0
    ) -> None:
        self.record = record
        self._store = store
        self._ttl = ttl
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
        """Takes the next epoch of the id and publishes the record. Raises when Redis cannot be reached."""
        epoch = int(await self._store.incr(self._keys[0]))
        self.record = replace(self.record, epoch=epoch, registered_at=time.time())
        self._active = True
        await self._write()
        log.info("registered", instance_id=self.record.instance_id, epoch=epoch, address=self.record.address)
        return epoch

    async def update(self, **changes: Any) -> None:
        """Changes fields of the record and publishes it now, or with a later heartbeat if Redis is away."""
        self.record = replace(self.record, **changes)
        if self._active:
            await self._beat()

    async def run(self) -> None:
        """Sends heartbeats until cancelled; outlasts outages of Redis.

        Raises FailedPrecondition (SUPERSEDED) when another process has registered under the id: this one
        must not go on under it.
        """
        while self._active:
            await self._beat()
            if is_cancelled():
                raise asyncio.CancelledError
            await asyncio.sleep(self._interval)

    async def deregister(self) -> None:
        """Removes the record at once. Raises when Redis cannot be reached; it then expires by itself."""
        self._active = False
        async with self._lock:
            await self._eval(_REMOVE, str(self.record.epoch), self.record.instance_id)

    async def _beat(self) -> None:
        try:
            await self._write()
        except OUTAGES as error:
            if self._reachable:
                log.warning("heartbeat_failed", instance_id=self.record.instance_id, error=str(error))
            self._reachable = False
            redis_up().set(0)
        else:
            if not self._reachable:
                log.info("heartbeat_resumed", instance_id=self.record.instance_id)
            self._reachable = True
            redis_up().set(1)

    async def _write(self) -> None:
        async with self._lock:
            if not self._active:
                return
            record, now = self.record, time.time()
            ttl = str(round(self._ttl * 1000))
            kept = await self._eval(
                _WRITE, str(record.epoch), record.to_json(), ttl, record.instance_id, now, now - INDEX_KEEPS
            )
        if not kept:
            self._active = False
            raise FailedPrecondition(
                "SUPERSEDED",
                f"another process has registered as {record.instance_id!r} after epoch {record.epoch}",
                instance_id=record.instance_id,
            )

    async def _eval(self, script: str, *arguments: str | float) -> int:
        return int(await self._store.eval(script, len(self._keys), *self._keys, *map(str, arguments)))


class Registry:
    """Reads who is registered."""

    def __init__(self, store: Redis, keys: Keys) -> None:
        self._store = store
        self._keys = keys

    async def list(self, service: str) -> dict[str, InstanceRecord]:
        """The live instances of a service by id. Raises when Redis cannot be reached."""
        members: Any = await self._store.zrange(self._keys.registry_index(service), 0, -1)
        ids = sorted(member.decode() for member in members)
        if not ids:
            return {}
        texts: list[Any] = await self._store.mget([self._keys.registry(service, each) for each in ids])
        found = {each: _parse(each, text) for each, text in zip(ids, texts, strict=True) if text is not None}
        return {each: record for each, record in found.items() if record is not None}

    async def watch(
        self,
        service: str,
        seconds: float,
        tell: Callable[[dict[str, InstanceRecord] | None], Awaitable[None]],
    ) -> NoReturn:
        """Tells what `list` finds, again and again with a pause of `seconds`, until cancelled. In an outage of
        Redis it tells None: what was told last is the best guess."""
        readable = True
        while not is_cancelled():
            records: dict[str, InstanceRecord] | None = None
            try:
                records = await self.list(service)
            except OUTAGES as error:
                if readable:
                    log.warning("registry_unreachable", service=service, error=str(error))
            readable = records is not None
            await tell(records)
            await asyncio.sleep(seconds)
        raise asyncio.CancelledError


def _parse(instance_id: str, text: bytes) -> InstanceRecord | None:
    try:
        return InstanceRecord.from_json(text)
    except (ValueError, TypeError) as error:
        # One unreadable record must not hide the rest of the fleet.
        log.warning("bad_registry_record", instance_id=instance_id, error=str(error))
        return None
