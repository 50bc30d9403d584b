"""Keeps a store's rollouts on disk: reads them at the start, writes them now and then."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import structlog

from services.drafts.metrics import DraftMetrics
from services.drafts.snapshot import BadSnapshot, open_snapshot, write_snapshot
from services.drafts.store import DraftStore

log = structlog.get_logger(__name__)


class Archive:
    """The snapshots of one store, in one file. `path` None: none are kept."""

    def __init__(self, path: Path | None, store: DraftStore) -> None:
        self.taken_at = 0.0
        """Unix seconds of the last snapshot, one found at the start included; 0 for none."""
        self._path = path
        self._store = store
        self._changes = store.changes

    def restore(self) -> None:
        """Puts into the empty store what the file holds.

        A file that cannot be used is renamed to *.refused; it costs the history in it, nothing more.
        """
        if self._path is None or not self._path.exists():
            return
        try:
            snapshot = open_snapshot(self._path)
            for rollout in snapshot.rollouts():
                self._store.put(rollout)
        except (BadSnapshot, OSError) as error:
            log.error("snapshot_refused", path=str(self._path), error=str(error))
            self._set_aside(self._path)
        else:
            self.taken_at = snapshot.at
            self._changes = self._store.changes
            log.info("snapshot_restored", path=str(self._path), prompts=self._store.prompts)

    async def run(self, interval: float, stopping: asyncio.Event, metrics: DraftMetrics) -> None:
        """Writes a snapshot every `interval` seconds until `stopping` is set, never one only in part."""
        while not stopping.is_set():
            try:
                async with asyncio.timeout(interval):
                    await stopping.wait()
            except TimeoutError:
                await self.take(metrics)

    async def take(self, metrics: DraftMetrics) -> None:
        """Writes a snapshot if something has changed, in a thread of its own; a failure is logged."""
        changes = self._store.changes
        if self._path is None or changes == self._changes:
            return
        at, began = time.time(), time.perf_counter()
        try:
            # Rollouts never change, so a list of them is a consistent picture.
            await asyncio.to_thread(write_snapshot, self._path, list(self._store), at)
        except OSError as error:
            metrics.snapshot_failures.inc()
            log.error("snapshot_failed", path=str(self._path), error=str(error))
            return
        metrics.snapshot_seconds.observe(time.perf_counter() - began)
        self.taken_at, self._changes = at, changes

    def _set_aside(self, path: Path) -> None:
        try:
            path.replace(path.with_name(f"{path.name}.refused"))
        except OSError as error:
            log.error("snapshot_not_set_aside", path=str(path), error=str(error))
