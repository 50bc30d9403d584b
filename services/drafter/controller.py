"""What a leading learner does: reads the feed, learns from it, and sees to what is published."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import structlog
from redis.asyncio import Redis

from services.drafter.collection import Collection
from services.drafter.config import DrafterConfig
from services.drafter.fleet import Fleet
from services.drafter.intake import Intake
from services.drafter.messages import Failed
from services.drafter.metrics import DrafterMetrics
from services.drafter.overlap import Overlap
from services.drafter.policy import PolicyFolders
from services.drafter.publication import Publication
from services.drafter.release import Release
from services.drafter.state import States
from services.drafter.study import Study
from services.drafter.training import Died, Training
from services.platform.decisions import DecisionLog
from services.platform.registry import Registry
from services.platform.store import OUTAGES, Keys
from services.platform.tasks import is_cancelled, until_one_ends

log = structlog.get_logger(__name__)

_TICK_SECONDS, _ACK_SECONDS, _POLICY_SECONDS = 0.1, 0.2, 0.5
_PAUSE, _LONG_PAUSE = 0.5, 2.0
# What was learned and is not saved is saved when nothing more was learned for so long.
_IDLE_SECONDS = 2.0
# Deaths of the training process in a row after which what it was learning from is given up.
_MOST_DEATHS = 2


class Controller:
    """One term of leadership. Build it with `open`, then `run` it until it is cancelled."""

    def __init__(
        self,
        config: DrafterConfig,
        redis: Redis,
        token: str,
        metrics: DrafterMetrics,
        training: Training,
        publication: Publication,
    ) -> None:
        self._config = config
        self._metrics = metrics
        self._training = training
        self._intake = Intake(redis, config.namespace, token)
        self._policies = PolicyFolders(redis, config.namespace, config.model)
        self.fleet = Fleet(config, Registry(redis, Keys(config.namespace)), publication, metrics)
        self.study = Study(config, training, States(config.states), self._policies, metrics)
        decisions = DecisionLog(redis, config.namespace)
        self.release = Release(config, publication, self.fleet, self.study, decisions, metrics)
        self.collection = Collection(config, metrics, time.monotonic)
        self._overlap = Overlap(config.gap_seconds)
        self._opened = asyncio.Event()
        self._deaths = 0
        self._learned_at = 0.0

    @classmethod
    async def open(
        cls, config: DrafterConfig, redis: Redis, token: str, metrics: DrafterMetrics, training: Training
    ) -> Controller:
        """Reads what former leaders left. Raises what Redis raises."""
        publication = await Publication.open(config, redis, token, metrics)
        return cls(config, redis, token, metrics, training, publication)

    async def run(self) -> None:
        """Works until cancelled. Raises Unavailable when another process leads."""
        works: list[Callable[[], Awaitable[None]]] = [
            self.fleet.run,
            self.release.tell,
            self._watch,
            self._follow_store,
        ]
        if not self._config.frozen:
            works += [self._read, self._acknowledge, self._learn]
        await self.release.give_first()
        tasks = [asyncio.ensure_future(work()) for work in works]
        try:
            await until_one_ends(tasks)
        finally:
            await self._training.stop()

    # What comes in ------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        # Not before it is known what is part of the state already.
        await self._opened.wait()
        while not is_cancelled():
            if self.collection.is_full:
                await asyncio.sleep(_TICK_SECONDS)
                continue
            try:
                entries = await self._intake.read()
            except OUTAGES as error:
                log.warning("feed_unreadable", error=str(error))
                await asyncio.sleep(_PAUSE)
                continue
            lost, self._intake.lost = self._intake.lost, 0
            self._metrics.dropped.labels("lost").inc(lost)
            self.collection.take_in(entries)

    async def _acknowledge(self) -> None:
        while not is_cancelled():
            await asyncio.sleep(_ACK_SECONDS)
            ids = self.collection.acks.take()
            try:
                if ids:
                    await self._intake.ack(ids)
                    self.collection.acknowledged(ids)
                self._metrics.backlog.set(await self._intake.backlog())
            except OUTAGES as error:
                self.collection.acks.put_back(ids)
                log.warning("feed_not_acknowledged", entries=len(ids), error=str(error))
                await asyncio.sleep(_PAUSE)

    async def _follow_store(self) -> None:
        """Where the policy's weights are, and that what is published is known there."""
        while not is_cancelled():
            try:
                await self._policies.refresh()
                await self.release.keep_record()
            except OUTAGES as error:
                log.warning("store_unreachable", error=str(error))
            await asyncio.sleep(_POLICY_SECONDS)

    # Learning -----------------------------------------------------------------------------------------------

    async def _learn(self) -> None:
        while True:
            try:
                await self._begin()
                while True:
                    await asyncio.sleep(_TICK_SECONDS)
                    self.collection.tick()
                    await self._go_back()
                    await self._save_if_idle()
                    if self._is_time() and await self.study.update(self.collection):
                        self._deaths, self._learned_at = 0, time.monotonic()
                        if self.study.manifest.updates % self._config.evaluate_every == 0:
                            await self.release.consider(self.collection, self._training)
            except Died as error:
                self._deaths += 1
                self._metrics.restarts.inc()
                log.error("training_process_died", error=str(error), in_a_row=self._deaths)
                self._take_back()
                await asyncio.sleep(_PAUSE if self._deaths < _MOST_DEATHS else _LONG_PAUSE)

    async def _begin(self) -> None:
        """Starts the training process where it was. What is wrong with the policy may be put right meanwhile."""
        while True:
            try:
                await self.study.open(self.release.published)
                break
            except Failed as error:
                log.error("learner_not_started", error=str(error))
                await asyncio.sleep(_LONG_PAUSE)
        if not self._opened.is_set():
            manifest = self.study.manifest
            self.collection = Collection(
                self._config, self._metrics, time.monotonic, used=manifest.used, forced=manifest.forced
            )
            self._opened.set()

    async def _go_back(self) -> None:
        """After a roll-back the learner goes on from what is in use: what it had learned since did not do well."""
        back = self.release.adopt
        if back is None:
            return
        try:
            await self._training.adopt(Path(back.path), back.sha256)
        except Failed as error:
            log.error("drafter_not_adopted", version=back.version, error=str(error))
        else:
            await self.study.save(self.collection)
        if self.release.adopt is back:
            self.release.adopt = None

    async def _save_if_idle(self) -> None:
        """When steps end, the last updates are saved though there are fewer than `save_every`."""
        now = time.monotonic()
        if not self.study.is_saved and now - self._learned_at >= _IDLE_SECONDS:
            self._learned_at = now
            await self.study.save(self.collection)

    def _is_time(self) -> bool:
        if not self.collection.schedule.is_due(len(self.collection.buffer)):
            return False
        return self._config.when == "always" or not self.fleet.busy

    def _take_back(self) -> None:
        """What was learned and not saved is learned again, unless the process seems to die of it."""
        lost = self.study.give_back()
        if self._deaths >= _MOST_DEATHS:
            self.collection.finish(lost, cause="failed")
        else:
            self.collection.return_to_buffer(lost)

    # Watching -----------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        before = time.monotonic()
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            now = time.monotonic()
            self._note_time(now - before)
            before = now
            await self.release.watch()

    def _note_time(self, seconds: float) -> None:
        overlap, told = self._overlap, (self._overlap.hidden, self._overlap.not_hidden)
        overlap.note(seconds, training=self.study.busy, busy=self.fleet.busy or self._policies.updating)
        self._metrics.training_seconds.labels("true").inc(overlap.hidden - told[0])
        self._metrics.training_seconds.labels("false").inc(overlap.not_hidden - told[1])
