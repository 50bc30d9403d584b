"""Training session of one term: read samples from the feed, update the drafter, save states, acknowledge entries.

A state appears on disk completely or not at all, and lists the samples trained on that the feed may not know of
yet. Feed entries are acknowledged after a state contains them, so a learner that continues from a state neither
trains on a sample twice nor loses one.
"""

from __future__ import annotations

import asyncio
import math
import re
import shutil
import time
import uuid
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import structlog
from pydantic import TypeAdapter
from redis.asyncio import Redis
from redis.exceptions import RedisError

from paceline.files import parse_object, sync
from services.contracts.drafter_checkpoint import Checkpoint
from services.contracts.gateway_keys import GatewayKeys
from services.contracts.learner import PublishedDrafter
from services.drafter.config import DrafterConfig
from services.drafter.feed.collector import SampleCollector
from services.drafter.feed.reader import FeedReader
from services.drafter.learning.data import TrainingSample, weights_of
from services.drafter.metrics import DrafterMetrics
from services.drafter.training.process import (
    CandidateComparison,
    TrainingDied,
    TrainingFailed,
    TrainingProcess,
    UpdateResult,
)
from services.platform.redis.connection import OUTAGES
from services.platform.tasks import is_cancelled

log = structlog.get_logger(__name__)

LEARNER, MANIFEST = "learner", "manifest.json"
"""Files in the folder of a state: the one that the learner writes, and the manifest."""
_NAME = re.compile(r"state-(\d{8,})-[0-9a-f]+")
_MAX_FOLDERS = 16
"""Versions whose folders are remembered."""
_FULL_SECONDS, _ACKNOWLEDGE_SECONDS = 0.1, 0.2
_RETRY_SECONDS, _LONG_RETRY_SECONDS = 0.5, 2.0
# Unsaved updates are saved once no further update has come for this time.
_IDLE_SECONDS = 2.0
# Deaths of the training process in a row after which the samples it was learning from are dropped.
_MAX_DEATHS = 2


class PolicyFolders:
    """Model folders of recent policy versions. `updating`: a weight update is under way."""

    def __init__(self, redis: Redis, namespace: str, model: Path) -> None:
        """Start with `model`, the unpublished weights that instances start with."""
        self.updating = False
        self._redis: Any = redis
        self._keys = GatewayKeys(namespace)
        self._model = model
        self._folders: OrderedDict[int, Path] = OrderedDict()

    async def refresh(self) -> None:
        """Read the published version. Raises Redis errors."""
        published, update = await self._redis.mget(self._keys.published, self._keys.update)
        self.updating = bool(update)
        if not published:
            return
        try:
            record = parse_object(published)
            version, path = int(record["version"]), str(record["path"])
        except (ValueError, KeyError, TypeError) as error:
            log.warning("published_version_unreadable", error=str(error))
            return
        if path:
            self._folders[version] = Path(path)
            while len(self._folders) > _MAX_FOLDERS:
                self._folders.popitem(last=False)

    def folder(self, version: int) -> Path | None:
        """Return the folder of a version, None if it is not known. The trainer may have removed the folder."""
        if version in self._folders:
            return self._folders[version]
        # While nothing was published, the instances have the weights they started with.
        return self._model if not self._folders or version == 0 else None


@dataclass(frozen=True, slots=True)
class Manifest:
    """Counters and samples that belong to the learner's weights.

    `used` are feed entries that were learned from and may not be acknowledged yet, `forced` the hashes of
    `ReplayBuffer`, and `since_roll_back` the updates since the last rollback (None: there was none), which was from
    version `rolled_back_from`.
    """

    updates: int = 0
    policy_version: int = 0
    samples_used: int = 0
    tokens_used: int = 0
    rejected: int = 0
    rollbacks: int = 0
    since_roll_back: int | None = None
    rolled_back_from: int = 0
    kd_loss: float = 0.0
    used: tuple[str, ...] = ()
    forced: tuple[int, ...] = ()


_MANIFESTS = TypeAdapter(Manifest)


class States:
    """Saved states under one folder, including states of earlier processes."""

    def __init__(self, root: Path, keep: int = 2) -> None:
        self._root = root
        self._keep = keep

    def new(self) -> Path:
        """Create a folder for the next state, where the learner writes LEARNER. OSError: it cannot be created."""
        path = self._root / f".{uuid.uuid4().hex}"
        path.mkdir(parents=True)
        return path

    def commit(self, fresh: Path, manifest: Manifest) -> Path:
        """Make a folder the latest state, durably, and remove old ones. OSError: it cannot be written."""
        (fresh / MANIFEST).write_bytes(_MANIFESTS.dump_json(manifest))
        for path in fresh.rglob("*"):
            sync(path)
        sync(fresh)
        done = self._root / f"state-{self._next():08d}-{uuid.uuid4().hex[:8]}"
        fresh.rename(done)
        sync(self._root)
        self._prune()
        return done

    def latest(self) -> Iterator[tuple[Path, Manifest]]:
        """Yield the readable states, the latest first."""
        for path in self._all():
            try:
                manifest = _MANIFESTS.validate_json((path / MANIFEST).read_bytes())
            except (OSError, ValueError) as error:
                log.warning("state_unreadable", path=str(path), error=str(error))
            else:
                yield path, manifest

    def _all(self) -> list[Path]:
        if not self._root.is_dir():
            return []
        found = [path for path in self._root.iterdir() if _NAME.fullmatch(path.name)]
        return sorted(found, key=lambda path: path.name, reverse=True)

    def _next(self) -> int:
        latest = next(iter(self._all()), None)
        found = _NAME.fullmatch(latest.name) if latest is not None else None
        return int(found[1]) + 1 if found is not None else 1

    def _prune(self) -> None:
        for path in self._all()[self._keep :]:
            shutil.rmtree(path, ignore_errors=True)
        for path in self._root.glob(".*"):
            # Left by a process that died while writing: there is only one writer.
            shutil.rmtree(path, ignore_errors=True)


class TrainingSession:
    """Training of the drafter during one term of leadership.

    `manifest` describes the state that would be written now; `busy`: the training process is at work.
    """

    def __init__(
        self,
        config: DrafterConfig,
        redis: Redis,
        term: int,
        metrics: DrafterMetrics,
        process: TrainingProcess,
    ) -> None:
        self.manifest = Manifest()
        self.busy = False
        self.samples = SampleCollector(config, metrics, time.monotonic)
        self.policies = PolicyFolders(redis, config.namespace, config.model)
        self._config = config
        self._metrics = metrics
        self._process = process
        self._feed = FeedReader(redis, config.namespace, term)
        self._states = States(config.states)
        # Samples learned from since the last state was written.
        self._unsaved: list[TrainingSample] = []
        self._save_failed = False
        self._started = asyncio.Event()
        self._adopting: PublishedDrafter | None = None
        self._deaths = 0
        self._updated_at = 0.0

    async def read_feed(self) -> None:
        """Collect samples until cancelled; starts after `start` has read which of them the state contains."""
        await self._started.wait()
        while not is_cancelled():
            if self.samples.is_full:
                await asyncio.sleep(_FULL_SECONDS)
                continue
            try:
                entries = await self._feed.read()
            except OUTAGES as error:
                log.warning("feed_unreadable", error=str(error))
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            lost, self._feed.lost = self._feed.lost, 0
            self._metrics.dropped.labels("lost").inc(lost)
            self.samples.take_in(entries)

    async def acknowledge(self) -> None:
        """Acknowledge finished entries until cancelled. Unavailable: another process leads."""
        while not is_cancelled():
            await asyncio.sleep(_ACKNOWLEDGE_SECONDS)
            ids = self.samples.entries.take_done()
            try:
                if ids:
                    await self._feed.acknowledge(ids)
                    self.samples.used.difference_update(ids)
                self._metrics.backlog.set(await self._feed.backlog())
            except OUTAGES as error:
                self.samples.entries.put_back(ids)
                log.warning("feed_not_acknowledged", entries=len(ids), error=str(error))
                await asyncio.sleep(_RETRY_SECONDS)

    async def start(self, published: PublishedDrafter | None) -> None:
        """Start the training process at the latest state that can be loaded.

        Without a state it begins with the published drafter, the configured one, or a fresh head. A rollback that
        the state does not have is made up for at the next `prepare`.

        Raises:
            TrainingFailed: the policy cannot be loaded, for example.
            TrainingDied: the process ended.
        """
        await self._process.stop()
        await self._process.start()
        if not await self._load_state():
            # Counters and used entries belong to weights that are gone.
            self.manifest = Manifest()
            if published is not None:
                await self._adopt(Path(published.path), published.sha256)
            elif self._config.checkpoint is not None:
                await self._adopt(self._config.checkpoint, "")
        if published is not None and published.rolled_back_from not in (0, self.manifest.rolled_back_from):
            # Its process, or the leader, died before a state had the earlier weights.
            self.roll_back_to(published)
        if not self._started.is_set():
            self.samples.resume(self.manifest.used, self.manifest.forced)
            self._started.set()

    async def stop(self) -> None:
        """Kill the training process."""
        await self._process.stop()

    async def recover(self, error: TrainingDied) -> None:
        """Return the samples of unsaved updates to the buffer after the training process died.

        After `_MAX_DEATHS` deaths in a row they are dropped instead: they may be the cause.
        """
        self._deaths += 1
        self._metrics.restarts.inc()
        log.error("training_process_died", error=str(error), in_a_row=self._deaths)
        lost, self._unsaved = self._unsaved, []
        self._save_failed = False
        if self._deaths >= _MAX_DEATHS:
            self.samples.finish(lost, cause="failed")
        else:
            self.samples.return_to_buffer(lost)
        await asyncio.sleep(_RETRY_SECONDS if self._deaths < _MAX_DEATHS else _LONG_RETRY_SECONDS)

    async def _load_state(self) -> bool:
        for path, manifest in self._states.latest():
            try:
                await self._process.call("load_state", path / LEARNER)
            except TrainingFailed as error:
                log.error("state_not_loaded", path=str(path), error=str(error))
                continue
            self.manifest = manifest
            log.info("learning_resumed", path=str(path), updates=manifest.updates)
            return True
        return False

    async def _adopt(self, path: Path, sha256: str) -> bool:
        try:
            await self._process.call("adopt", path, sha256)
        except TrainingFailed as error:
            log.error("drafter_not_adopted", path=str(path), error=str(error))
            return False
        return True

    async def prepare(self) -> None:
        """Do the work that is due between updates. TrainingDied: the process is gone."""
        self.samples.tick()
        await self._continue_from_rollback()
        await self._save_if_idle()

    async def update(self) -> bool:
        """Update the drafter on samples of the buffer, and return True if that was possible.

        While no state can be written there is no update: samples that are learned from stay in memory until a state
        has them, and the buffer is bounded.

        TrainingDied: the process is gone; call `recover`, which keeps or drops the samples.
        """
        if self._save_failed:
            return False
        chosen = self.samples.draw(seed=self.manifest.updates + 1)
        if not chosen:
            return False
        try:
            result = await self._train(chosen)
        except TrainingFailed as error:
            log.error("update_failed", error=str(error), samples=len(chosen))
            self._metrics.updates.labels("failed").inc()
            self.samples.finish(chosen, cause="failed")
            return False
        self._count(result)
        self._unsaved += chosen
        if self.manifest.updates % self._config.save_every == 0:
            await self._save()
        self._deaths, self._updated_at = 0, time.monotonic()
        return True

    async def save_drafter(self, version: int) -> Checkpoint:
        """Write the current drafter as version `version`. TrainingFailed or TrainingDied: it was not written."""
        saved: Checkpoint = await self._process.call("save", self._config.checkpoints, version)
        return saved

    async def compare(self, current: Path | None) -> CandidateComparison:
        """Evaluate the current drafter, and the one in use, on the held-out samples."""
        self.busy = True
        try:
            return await self._process.compare(list(self.samples.buffer.held_out), current)
        finally:
            self.busy = False

    def count_rejection(self) -> None:
        """Count a candidate that was not published."""
        self.manifest = replace(self.manifest, rejected=self.manifest.rejected + 1)

    def roll_back_to(self, published: PublishedDrafter) -> None:
        """Continue training from this drafter at the next `prepare`; updates since then are discarded."""
        self.manifest = replace(
            self.manifest,
            rollbacks=self.manifest.rollbacks + 1,
            since_roll_back=0,
            rolled_back_from=published.rolled_back_from,
        )
        self._adopting = published

    async def _continue_from_rollback(self) -> None:
        back = self._adopting
        if back is None:
            return
        adopted = await self._adopt(Path(back.path), back.sha256)
        if self._adopting is back:
            self._adopting = None
        if adopted:
            await self._save()

    async def _save_if_idle(self) -> None:
        """Save the last updates when no more come, even if there are fewer than `save_every`.

        A save that failed is repeated.
        """
        now = time.monotonic()
        if (self._unsaved or self._save_failed) and now - self._updated_at >= _IDLE_SECONDS:
            self._updated_at = now
            await self._save()

    async def _train(self, chosen: Sequence[TrainingSample]) -> UpdateResult:
        try:
            await self.policies.refresh()
        except RedisError as error:
            log.warning("policy_unknown", error=str(error))
        self.busy = True
        try:
            weights = weights_of(chosen, self._config.weighting)
            return await self._process.update(chosen, weights, self.policies.folder)
        except TrainingDied:
            # These samples may have killed the process.
            self._unsaved += chosen
            raise
        finally:
            self.busy = False

    async def _save(self) -> None:
        """Write a durable state of all updates so far, and release its samples."""
        if self._adopting is not None:
            # The counters already belong to the earlier weights, which the process does not have yet.
            return
        used = self.samples.used | {each.entries[0] for each in self._unsaved}
        forced = tuple(sorted(self.samples.buffer.forced))
        manifest = replace(self.manifest, used=tuple(sorted(used)), forced=forced)
        fresh: Path | None = None
        try:
            fresh = await asyncio.to_thread(self._states.new)
            await self._process.call("save_state", fresh / LEARNER)
            await asyncio.to_thread(self._states.commit, fresh, manifest)
        except (TrainingFailed, OSError) as error:
            # Nothing is acknowledged until a save succeeds.
            log.error("state_not_saved", error=str(error))
            self._save_failed = True
            if fresh is not None:
                await asyncio.to_thread(shutil.rmtree, fresh, ignore_errors=True)
            return
        self._save_failed = False
        done, self._unsaved = self._unsaved, []
        self.samples.used.update(each.entries[0] for each in done)
        self.samples.finish(done)

    def _count(self, result: UpdateResult) -> None:
        before = self.manifest
        self.manifest = replace(
            before,
            updates=before.updates + 1,
            policy_version=result.policy_version,
            samples_used=before.samples_used + result.samples,
            tokens_used=before.tokens_used + result.tokens,
            kd_loss=result.kd_loss if math.isfinite(result.kd_loss) else before.kd_loss,
            since_roll_back=None if before.since_roll_back is None else before.since_roll_back + 1,
        )
        metrics = self._metrics
        metrics.updates.labels("done").inc()
        metrics.update_seconds.observe(result.seconds)
        metrics.samples_used.inc(result.samples)
        metrics.tokens_used.inc(result.tokens)
        metrics.policy_missed.inc(result.missed)
        metrics.policy_version.set(result.policy_version)
        metrics.kd_loss.set(self.manifest.kd_loss)
        log.info(
            "drafter_updated",
            update=self.manifest.updates,
            samples=result.samples,
            tokens=result.tokens,
            kd_loss=round(self.manifest.kd_loss, 5),
            seconds=round(result.seconds, 3),
            steps=self.samples.steps,
        )
