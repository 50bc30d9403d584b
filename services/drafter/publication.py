"""Publishes drafters and takes them back: checkpoint, record in Redis, and what instances are told."""

from __future__ import annotations

import asyncio
import hashlib
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import structlog
from redis.asyncio import Redis

from services.drafter import checkpoint as checkpoints
from services.drafter.canary import Live
from services.drafter.checkpoint import Checkpoint, CorruptCheckpoint
from services.drafter.config import DrafterConfig
from services.drafter.metrics import DrafterMetrics
from services.drafter.record import History, Published, RecordWriter, read_history
from services.drafter.training import Training
from services.platform.errors import FailedPrecondition
from services.platform.pulse import Pulse
from services.platform.store import Keys

log = structlog.get_logger(__name__)


class Publication:
    """What is published, for one term of leadership. The order is: checkpoint, record, instances. Whatever dies in
    between, the record names a checkpoint that is whole, and instances are brought to the record."""

    def __init__(
        self, config: DrafterConfig, redis: Redis, token: str, metrics: DrafterMetrics, history: History
    ) -> None:
        self.changed = Pulse()
        self.history = history
        self._reader = partial(read_history, redis, Keys(config.namespace))
        self._config = config
        self._writer = RecordWriter(redis, config.namespace, token)
        self._metrics = metrics
        self._show()

    @classmethod
    async def open(
        cls, config: DrafterConfig, redis: Redis, token: str, metrics: DrafterMetrics
    ) -> Publication:
        """Reads what former leaders published. Raises what Redis raises."""
        history = await read_history(redis, Keys(config.namespace))
        return cls(config, redis, token, metrics, history)

    @property
    def published(self) -> Published | None:
        """What instances are to draft with."""
        return self.history.current

    async def give(self, path: Path) -> Published:
        """Publishes the drafter to begin with, as it is. CorruptCheckpoint: it cannot be read; else as
        `publish`."""
        digest = await asyncio.to_thread(_digest, path)
        highest = await asyncio.to_thread(self._highest)
        version = await self._writer.next_version(highest)
        new = Published(version, str(path), digest, at=time.time())
        await self._put(self.history.with_published(new, self._config.keep))
        return new

    async def publish(
        self,
        training: Training,
        acceptance_length: float,
        policy_version: int,
        live: Live,
        least: int,
    ) -> Published:
        """Writes the learner's drafter and publishes it. `live` is what became of the drafts of the one in use, and
        `least` a version that the new one's must be above.

        Raises:
            CorruptCheckpoint: what was written does not read back; nothing is published.
            Failed, Died: the learner could not write it.
            Unavailable: another process leads. And what Redis raises.
        """
        # Given out before it is written: a version never names two drafters, whoever writes beside us.
        highest = await asyncio.to_thread(self._highest)
        version = await self._writer.next_version(max(least, highest))
        saved: Checkpoint = await training.save(self._config.checkpoints, version)
        await asyncio.to_thread(checkpoints.verify, saved.path, saved.sha256)
        new = Published(
            version,
            str(saved.path.absolute()),
            saved.sha256,
            acceptance_length,
            policy_version,
            time.time(),
            (live.drafts, live.tokens, live.accepted),
        )
        await self._put(self.history.with_published(new, self._config.keep))
        await asyncio.to_thread(self._prune)
        return new

    async def roll_back(self) -> tuple[Published, Published]:
        """Publishes the one before again, the next before if that cannot be read; which was left, and for which.

        FailedPrecondition: there is none. Unavailable: another process leads. And what Redis raises.
        """
        left, history = self.history.current, self.history
        while (back := history.rolled_back()) is not None and left is not None:
            history = back
            assert history.current is not None, "it was published"
            try:
                await asyncio.to_thread(
                    checkpoints.verify, Path(history.current.path), history.current.sha256
                )
            except CorruptCheckpoint as error:
                log.error("earlier_drafter_unreadable", version=history.current.version, error=str(error))
                continue
            # Nothing is known of how it does by now.
            current = replace(history.current, at=time.time(), before=(0, 0, 0))
            await self._put(History(current, history.earlier))
            return left, current
        raise FailedPrecondition("NO_EARLIER_DRAFTER", "no drafter was published before that can be read")

    async def keep(self) -> None:
        """Writes the record again if Redis has lost it: instances that start look for it. Raises as `_put`."""
        if self.history.current is not None and (await self._reader()).current is None:
            log.warning("drafter_record_lost", version=self.history.current.version)
            await self._writer.put(self.history)

    async def _put(self, history: History) -> None:
        await self._writer.put(history)
        self.history = history
        self._show()
        self.changed.beat()

    def _highest(self) -> int:
        known = [self.history.current] if self.history.current is not None else []
        versions = [each.version for each in (*known, *self.history.earlier)]
        return max([*versions, *self._on_disk()], default=0)

    def _on_disk(self) -> dict[int, Path]:
        if not self._config.checkpoints.is_dir():
            return {}
        found = {}
        for path in self._config.checkpoints.iterdir():
            try:
                found[checkpoints.version_of(path)] = path
            except ValueError:
                continue
        return found

    def _prune(self) -> None:
        """Removes drafters that nobody can go back to."""
        current = self.history.current
        kept = {each.path for each in self.history.earlier} | ({current.path} if current else set())
        for path in self._on_disk().values():
            if str(path.absolute()) not in kept:
                checkpoints.discard(path)

    def _show(self) -> None:
        current = self.history.current
        self._metrics.version.set(current.version if current is not None else 0)
        self._metrics.published_at.set(current.at if current is not None else 0)


def _digest(path: Path) -> str:
    checkpoints.read_config(path)
    try:
        with (path / checkpoints.WEIGHTS).open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise CorruptCheckpoint(path, f"{checkpoints.WEIGHTS} cannot be read: {error.strerror}") from error
