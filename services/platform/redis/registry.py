"""Registry of live processes: each keeps a record in Redis that expires when its heartbeat stops.

`Registration` writes the record of this process, and `Registry` reads all of them. A record can also expire because
Redis was unreachable, refused writes, hung or lost data; `OutageGrace` keeps such records until their processes
have had time to write them again.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Generic, NoReturn, TypeVar

import structlog
from redis.asyncio import Redis

from services.contracts.errors import FailedPrecondition
from services.platform.redis.connection import COMMAND_TIMEOUT, OUTAGES, Keys, Refused, show_outage
from services.platform.tasks import ExponentialBackoff, is_cancelled

log = structlog.get_logger(__name__)

R = TypeVar("R")

INSTANCES = "generation"
"""Name of the service of generation instances."""
HEARTBEAT = 1.0
"""Seconds between the heartbeats of a process."""
SETTLING = COMMAND_TIMEOUT + HEARTBEAT
"""Seconds after an outage of Redis in which records may be missing: a heartbeat that hangs in the outage fails, and
then the next one is sent."""
# Records that are parsed in one turn of the event loop.
_CHUNK = 100
# Milliseconds that a watcher's own key outlives its last reading.
_PROBE_MS = 60_000
INDEX_KEEPS = 3600.0
"""Seconds that an id stays in the index without a heartbeat, far more than clocks can differ."""
# Seconds between attempts in an outage of Redis: to register, first and longest, and to send heartbeats.
_FIRST_DELAY, _LONGEST_DELAY, _SOON = 0.1, 2.0, 0.25

# KEYS: index. ARGV: prefix of the keys of records, in the slot of the index. Returns the ids of all records, each
# followed by the record, as lines of one text, since a client takes microseconds for every element of a list.
_LIST = """
local found = {}
for _, id in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
  local record = redis.call('GET', ARGV[1] .. id)
  if record and not string.find(id .. record, '\\n', 1, true) then
    found[#found + 1] = id
    found[#found + 1] = record
  end
end
return table.concat(found, '\\n')
"""

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

# KEYS as above. ARGV: epoch, ttl in ms. Extends the last record; a full Redis still accepts this.
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


@dataclass(frozen=True, slots=True)
class InstanceRecord:
    """Registration of a process. `registered_at` is in unix seconds; addresses are "host:port"."""

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
    has_text: bool = False
    end_tokens: list[int] = field(default_factory=list)
    model: str = ""
    device: str = ""
    refused_features: dict[str, str] = field(default_factory=dict)
    # Samples can keep their KV over an update. Earlier releases do not write it.
    keeps_kv: bool = False
    registered_at: float = 0.0

    @property
    def samples(self) -> int:
        """Running and waiting samples of a step on an instance."""
        return int(self.load.get("running", 0)) + int(self.load.get("waiting", 0))

    def to_json(self) -> str:
        """Return the record as one JSON object."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> InstanceRecord:
        """Parse `to_json`; fields of a later version are ignored. ValueError if it is not a record."""
        values = json.loads(text)
        if not isinstance(values, dict) or not {"service", "instance_id"} <= values.keys():
            raise ValueError("not an instance record")
        known = {each.name for each in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})


class Registration:
    """Registration of one process.

    Usage: `await register()`, then `run()` in a separate task until the end, then `await deregister()`. The record
    outlives the last heartbeat by `ttl` seconds; one is sent every `interval` seconds. `reachable` is called with
    False when Redis stops taking heartbeats, and with True when it takes them again.
    """

    def __init__(
        self,
        store: Redis,
        keys: Keys,
        record: InstanceRecord,
        ttl: float = 3.0,
        interval: float = HEARTBEAT,
        reachable: Callable[[bool], Awaitable[None]] | None = None,
    ) -> None:
        self.record = record
        self.reachable = reachable
        self._store = store
        self._ttl_ms = round(ttl * 1000)
        self._interval = interval
        self._active = False
        self._takes_heartbeats = True
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
                await self._show(error)
                await asyncio.sleep(backoff.failed())
        await self._show(None)
        log.info("registered", instance_id=self.record.instance_id, epoch=epoch, address=self.record.address)
        return epoch

    async def update(self, **changes: Any) -> None:
        """Change fields of the record and publish it now, or after an outage of Redis with a later heartbeat."""
        self.record = replace(self.record, **changes)
        if self._active:
            await self._send_heartbeat()

    async def run(self) -> None:
        """Send heartbeats until cancelled; continues through outages of Redis.

        Raises FailedPrecondition (SUPERSEDED) if another process has registered under the id, so that this one
        must end.
        """
        while self._active:
            await self._send_heartbeat()
            if is_cancelled():
                raise asyncio.CancelledError
            await asyncio.sleep(self.pause(self._interval))

    def pause(self, seconds: float) -> float:
        """Return the seconds until the next heartbeat: `seconds`, or less after one that failed."""
        return seconds if self._takes_heartbeats else min(seconds, _SOON)

    async def deregister(self) -> None:
        """Remove the record at once. Raises errors of Redis; the record then expires by itself."""
        self._active = False
        async with self._lock:
            await self._eval(_REMOVE, str(self.record.epoch), self.record.instance_id)

    async def _send_heartbeat(self) -> None:
        try:
            await self._write()
        except OUTAGES as error:
            await self._show(error)
            if isinstance(error, Refused):
                with suppress(*OUTAGES):
                    await self._eval(_KEEP, str(self.record.epoch), self._ttl_ms)
        else:
            await self._show(None)

    async def _show(self, error: Exception | None) -> None:
        """Show in metrics whether Redis took a heartbeat, and report a change."""
        show_outage(error)
        if self._takes_heartbeats == (error is None):
            return
        self._takes_heartbeats = error is None
        if error is not None:
            log.warning("heartbeat_failed", instance_id=self.record.instance_id, error=str(error))
        else:
            log.info("heartbeat_resumed", instance_id=self.record.instance_id)
        if self.reachable is not None:
            await self.reachable(self._takes_heartbeats)

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


class Registry:
    """Reader of the registry."""

    def __init__(self, store: Redis, keys: Keys) -> None:
        self._store = store
        self._keys = keys
        # By service and id, the last text and its record: most reads return the same text again.
        self._read: dict[str, dict[str, tuple[bytes, InstanceRecord | None]]] = {}

    async def list(self, service: str) -> dict[str, InstanceRecord]:
        """Return the live instances of a service by id. Raises errors of Redis."""
        index, prefix = self._keys.registry_index(service), self._keys.registry(service, "")
        listed: Any = await self._store.eval(_LIST, 1, index, prefix)
        lines = listed.split(b"\n") if listed else []
        before = self._read.get(service, {})
        read: dict[str, tuple[bytes, InstanceRecord | None]] = {}
        for number, (name, text) in enumerate(sorted(zip(lines[::2], lines[1::2], strict=True)), 1):
            each = name.decode()
            known = before.get(each)
            read[each] = known if known and known[0] == text else (text, _parse(each, text))
            if number % _CHUNK == 0:
                await asyncio.sleep(0)
        self._read[service] = read
        return {each: record for each, (_, record) in read.items() if record is not None}

    async def watch(
        self,
        service: str,
        seconds: float,
        report: Callable[[dict[str, InstanceRecord] | None], Awaitable[None]],
    ) -> NoReturn:
        """Call `report` with the live instances every `seconds`, until cancelled; with None if they cannot be read.

        An outage of Redis makes no instance count as gone: see `OutageGrace`.
        """
        present = self.present(service, seconds)
        while not is_cancelled():
            await report(await present.read())
            await asyncio.sleep(seconds)
        raise asyncio.CancelledError

    def present(self, service: str, seconds: float) -> LiveInstances:
        """Return a reader of the live instances of a service, for readings about every `seconds`."""
        probe = f"{self._keys.registry_index(service)}:watch:{uuid.uuid4().hex}"
        return LiveInstances(self, self._store, service, probe, OutageGrace(seconds + HEARTBEAT, SETTLING))


class LiveInstances:
    """Reader of the instances of a service that are not known to be gone: see `OutageGrace`."""

    def __init__(
        self, registry: Registry, store: Redis, service: str, probe: str, grace: OutageGrace[InstanceRecord]
    ) -> None:
        self._registry = registry
        self._store = store
        self._service = service
        # Key that is written with each reading, to see whether Redis takes writes and still has the last one.
        self._probe = probe
        self._grace = grace
        self._usable, self._probed = True, False

    async def read(self) -> dict[str, InstanceRecord] | None:
        """Return the live instances by id; None if they cannot be read."""
        try:
            records = await self._registry.list(self._service)
            if await self._store.set(self._probe, 1, px=_PROBE_MS, get=True) is None and self._probed:
                self._grace.disturbed(time.monotonic())
        except OUTAGES as error:
            self._grace.disturbed(time.monotonic())
            if self._usable:
                log.warning("registry_unreachable", service=self._service, error=str(error))
            self._usable = False
            return None
        self._usable = self._probed = True
        return self._grace.update(records, time.monotonic())


class OutageGrace(Generic[R]):
    """Live records by id, of which an outage of Redis removes none.

    A record that is missing from a reading counts as gone only if the last disturbance is at least `settling` ago.
    Readings more than `longest_gap` apart count as a disturbance, since Redis or this process may have hung between
    them. Times are in seconds of one clock, which callers pass.
    """

    def __init__(self, longest_gap: float, settling: float) -> None:
        self._longest_gap = longest_gap
        self._settling = settling
        self._records: dict[str, R] = {}
        self._read_at: float | None = None
        self._settled_at = float("-inf")

    def disturbed(self, now: float) -> None:
        """Record that Redis failed, refused a write or lost data."""
        self._settled_at = now + self._settling

    def update(self, records: Mapping[str, R], now: float) -> dict[str, R]:
        """Take the records of a reading; return the records of all processes that are not known to be gone."""
        if self._read_at is not None and now - self._read_at > self._longest_gap:
            self.disturbed(now)
        self._read_at = now
        kept = self._records if now < self._settled_at else {}
        self._records = {**kept, **records}
        return dict(self._records)


def _parse(instance_id: str, text: bytes) -> InstanceRecord | None:
    try:
        return InstanceRecord.from_json(text)
    except (ValueError, TypeError) as error:
        # One unreadable record must not hide the rest of the fleet.
        log.warning("bad_registry_record", instance_id=instance_id, error=str(error))
        return None
