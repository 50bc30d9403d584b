"""Record of published drafters: their checkpoints on disk, and which of them Redis names as current."""

from __future__ import annotations

import asyncio
from pathlib import Path

import structlog
from redis.asyncio import Redis

from services.contracts.drafter import checkpoint as checkpoints
from services.contracts.drafter.keys import DrafterKeys
from services.contracts.drafter.record import DrafterHistory, PublishedDrafter, read_history
from services.contracts.fenced import FencedScripts
from services.drafter.config import DrafterConfig
from services.drafter.metrics import DrafterMetrics
from services.platform.notify import Notifier

log = structlog.get_logger(__name__)

# KEYS: lease, version. ARGV: term, least. Returns a version above `least` that was never used.
_NEXT_VERSION = """
local known = tonumber(redis.call('GET', KEYS[2]) or '0')
local new = math.max(known, tonumber(ARGV[2])) + 1
redis.call('SET', KEYS[2], string.format('%d', new))
return new
"""

# KEYS: lease, published. ARGV: term, record.
_PUT = """
redis.call('SET', KEYS[2], ARGV[2])
return 1
"""


class PublicationRecord:
    """The record as its one writer, the leader, has it; `changed` notifies of a new current drafter.

    Methods raise what Redis raises, and Unavailable when another process leads; they may be repeated.
    """

    def __init__(
        self, config: DrafterConfig, redis: Redis, term: int, metrics: DrafterMetrics, history: DrafterHistory
    ) -> None:
        self.changed = Notifier()
        self.history = history
        self._redis = redis
        self._namespace = config.namespace
        self._folder = config.checkpoints
        self._keys = DrafterKeys(config.namespace)
        self._scripts = FencedScripts(redis, self._keys.lease, term, "learner")
        self._metrics = metrics
        self._show()

    @property
    def current(self) -> PublishedDrafter | None:
        """The drafter that instances should use; None before any was published."""
        return self.history.current

    async def next_version(self, least: int = 0) -> int:
        """Reserve a version that never named a drafter, above `least` and above every version on disk."""
        highest = await asyncio.to_thread(self._highest_version)
        return int(await self._scripts.run(_NEXT_VERSION, (self._keys.version,), max(least, highest)))

    async def put(self, history: DrafterHistory) -> None:
        """Make a history the record: instances load its current drafter from now on."""
        await self._write(history)
        self.history = history
        self._show()
        self.changed.notify()

    async def restore(self) -> None:
        """Write the record again if Redis has lost it: instances read it when they start."""
        if self.current is not None and (await read_history(self._redis, self._namespace)).current is None:
            log.warning("drafter_record_lost", version=self.current.version)
            await self._write(self.history)

    def prune(self) -> None:
        """Remove the checkpoints that no rollback can reach."""
        kept = {each.path for each in self._recorded()}
        for path in self._on_disk().values():
            if str(path.absolute()) not in kept:
                checkpoints.discard(path)

    async def _write(self, history: DrafterHistory) -> None:
        await self._scripts.run(_PUT, (self._keys.published,), history.to_json())

    def _recorded(self) -> list[PublishedDrafter]:
        current = self.history.current
        return [*self.history.earlier, *([current] if current is not None else [])]

    def _highest_version(self) -> int:
        return max([*(each.version for each in self._recorded()), *self._on_disk()], default=0)

    def _on_disk(self) -> dict[int, Path]:
        found = {}
        for path in self._folder.iterdir() if self._folder.is_dir() else ():
            try:
                found[checkpoints.version_of(path)] = path
            except ValueError:
                continue
        return found

    def _show(self) -> None:
        self._metrics.version.set(self.current.version if self.current is not None else 0)
        self._metrics.published_at.set(self.current.at if self.current is not None else 0)
