"""Registry of live processes: each keeps a record in Redis that expires when its heartbeat stops."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NoReturn

import structlog
from redis.asyncio import Redis

from services.platform.redis.connection import COMMAND_TIMEOUT, OUTAGES, Keys
from services.platform.redis.presence import Presence
from services.platform.tasks import is_cancelled

log = structlog.get_logger(__name__)

INSTANCES = "generation"
"""Name of the service of generation instances."""
HEARTBEAT = 1.0
"""Seconds between the heartbeats of a process."""
SETTLING = COMMAND_TIMEOUT + HEARTBEAT
"""Seconds after an outage of Redis in which records may be missing: a heartbeat that hangs in it fails, and the
next is sent."""
# Records that are looked at in one turn of the event loop.
_CHUNK = 100
# Milliseconds that a watcher's own key outlives its last reading.
_PROBE_MS = 60_000

# KEYS: index. ARGV: what the keys of records begin with, in the slot of the index. Returns the ids of all records,
# each followed by the record, as lines of one text: a client takes microseconds for every element of a list.
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


class Registry:
    """Reader of the registry."""

    def __init__(self, store: Redis, keys: Keys) -> None:
        self._store = store
        self._keys = keys
        # By service and id, the last text that was read and what it says: most reads bring the same again.
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
        tell: Callable[[dict[str, InstanceRecord] | None], Awaitable[None]],
    ) -> NoReturn:
        """Call `tell` with the live instances every `seconds`, until cancelled; with None if they cannot be read.

        No instance is gone because an outage of Redis kept its heartbeats away: see `Presence`.
        """
        present = self.present(service, seconds)
        while not is_cancelled():
            await tell(await present.read())
            await asyncio.sleep(seconds)
        raise asyncio.CancelledError

    def present(self, service: str, seconds: float) -> PresentInstances:
        """Return a reader of the live instances of a service, for readings about every `seconds`."""
        probe = f"{self._keys.registry_index(service)}:watch:{uuid.uuid4().hex}"
        return PresentInstances(self, self._store, service, probe, Presence(seconds + HEARTBEAT, SETTLING))


class PresentInstances:
    """Reader of the instances of a service that are not known to be gone: see `Presence`."""

    def __init__(
        self, registry: Registry, store: Redis, service: str, probe: str, presence: Presence[InstanceRecord]
    ) -> None:
        self._registry = registry
        self._store = store
        self._service = service
        # Key that is written with each reading: it tells whether Redis takes writes, and still has what it took.
        self._probe = probe
        self._presence = presence
        self._usable, self._probed = True, False

    async def read(self) -> dict[str, InstanceRecord] | None:
        """Return the live instances by id; None if they cannot be read."""
        try:
            records = await self._registry.list(self._service)
            if await self._store.set(self._probe, 1, px=_PROBE_MS, get=True) is None and self._probed:
                self._presence.disturbed(time.monotonic())
        except OUTAGES as error:
            self._presence.disturbed(time.monotonic())
            if self._usable:
                log.warning("registry_unreachable", service=self._service, error=str(error))
            self._usable = False
            return None
        self._usable = self._probed = True
        return self._presence.read(records, time.monotonic())


def _parse(instance_id: str, text: bytes) -> InstanceRecord | None:
    try:
        return InstanceRecord.from_json(text)
    except (ValueError, TypeError) as error:
        # One unreadable record must not hide the rest of the fleet.
        log.warning("bad_registry_record", instance_id=instance_id, error=str(error))
        return None
