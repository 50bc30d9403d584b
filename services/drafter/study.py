"""Learning, update by update: what is drawn from the buffer, trained on, saved, and measured."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import structlog
from redis.exceptions import RedisError

from services.drafter.collection import Collection, rollout_of
from services.drafter.config import DrafterConfig
from services.drafter.join import Joined
from services.drafter.messages import Compared, Failed, Part, Updated
from services.drafter.metrics import DrafterMetrics
from services.drafter.policy import PolicyFolders
from services.drafter.record import Published
from services.drafter.rollout import Rollout
from services.drafter.state import LEARNER, Manifest, States
from services.drafter.training import Died, Training
from services.drafter.weighting import weights_of

log = structlog.get_logger(__name__)


class Study:
    """The learner's side of a term. `manifest` is what a state written now would say; `training` tells whether the
    training process is at work."""

    def __init__(
        self,
        config: DrafterConfig,
        training: Training,
        states: States,
        policies: PolicyFolders,
        metrics: DrafterMetrics,
    ) -> None:
        self.manifest = Manifest()
        self.busy = False
        self._config = config
        self._training = training
        self._states = states
        self._policies = policies
        self._metrics = metrics
        # Learned from since the last state.
        self._unsaved: list[Joined] = []

    async def open(self, published: Published | None) -> None:
        """Starts the training process where the last state is; without one from what is published, or was given, or
        else from a fresh head. Failed or Died when it does not start."""
        await self._training.stop()
        await self._training.start()
        for path, manifest in self._states.latest():
            try:
                await self._training.load_state(path / LEARNER)
            except Failed as error:
                log.error("state_not_loaded", path=str(path), error=str(error))
                continue
            self.manifest = manifest
            log.info("learning_resumed", path=str(path), updates=manifest.updates)
            return
        # Counters and acknowledgements belong to weights that are gone.
        self.manifest = Manifest()
        if published is not None:
            await self._begin_from(Path(published.path), published.sha256)
        elif self._config.checkpoint is not None:
            await self._begin_from(self._config.checkpoint, "")

    async def _begin_from(self, path: Path, sha256: str) -> None:
        try:
            await self._training.adopt(path, sha256)
        except Failed as error:
            log.error("drafter_not_adopted", path=str(path), error=str(error))

    async def update(self, collection: Collection) -> bool:
        """One update on what the buffer gives; whether there was one."""
        number = self.manifest.updates + 1
        draw = collection.buffer.draw(self._config.interval, self._config.update_tokens, number)
        collection.schedule.begun()
        collection.finish(draw.passed_over, cause="passed_over")
        if not draw.chosen:
            return False
        try:
            done = await self._train(draw.chosen)
        except Failed as error:
            log.error("update_failed", error=str(error), samples=len(draw.chosen))
            self._metrics.updates.labels("failed").inc()
            collection.finish(draw.chosen, cause="failed")
            return False
        self._count(done, collection)
        self._unsaved += draw.chosen
        if self.manifest.updates % self._config.save_every == 0:
            await self.save(collection)
        return True

    async def save(self, collection: Collection) -> None:
        """Makes all that was learned so far durable, and lets go of what it was learned from."""
        used = collection.used | {each.entries[0] for each in self._unsaved}
        manifest = replace(
            self.manifest, used=tuple(sorted(used)), forced=tuple(sorted(collection.buffer.forced))
        )
        try:
            fresh = await asyncio.to_thread(self._states.new)
            await self._training.save_state(fresh / LEARNER)
            await asyncio.to_thread(self._states.commit, fresh, manifest)
        except (Failed, OSError) as error:
            # Nothing is acknowledged until it can be saved.
            log.error("state_not_saved", error=str(error))
            return
        collection.used = used
        done, self._unsaved = self._unsaved, []
        collection.finish(done)

    async def compare(self, collection: Collection, current: Path | None) -> Compared:
        """Measures the drafter, and the one in use, on the held-out samples."""
        rollouts = [rollout_of(each) for each in collection.buffer.held_out]
        self.busy = True
        try:
            return await self._training.compare(rollouts, current)
        finally:
            self.busy = False

    @property
    def is_saved(self) -> bool:
        """Whether all that was learned is part of a state."""
        return not self._unsaved

    def give_back(self) -> list[Joined]:
        """What was learned from and is lost with the training process: it is to be learned from again."""
        lost, self._unsaved = self._unsaved, []
        return lost

    def rolled_back(self) -> None:
        """A drafter was taken back."""
        self.manifest = replace(self.manifest, roll_backs=self.manifest.roll_backs + 1, since_roll_back=0)

    def rejected(self) -> None:
        """A candidate was not published."""
        self.manifest = replace(self.manifest, rejected=self.manifest.rejected + 1)

    async def _train(self, chosen: Sequence[Joined]) -> Updated:
        try:
            await self._policies.refresh()
        except RedisError as error:
            log.warning("policy_unknown", error=str(error))
        self.busy = True
        try:
            done = await self._training.update(self._parts([rollout_of(each) for each in chosen]))
        except Died:
            # Perhaps it was these samples that it died of: they are tried once more by whoever comes next.
            self._unsaved += chosen
            raise
        finally:
            self.busy = False
        return done

    def _parts(self, rollouts: Sequence[Rollout]) -> list[Part]:
        weights = weights_of(rollouts, self._config.weighting)
        by_version: dict[int, list[int]] = defaultdict(list)
        for place, rollout in enumerate(rollouts):
            by_version[rollout.policy_version].append(place)
        return [
            Part(
                version,
                self._policies.folder(version),
                tuple(rollouts[place] for place in places),
                tuple(weights[place] for place in places),
            )
            for version, places in sorted(by_version.items())
        ]

    def _count(self, done: Updated, collection: Collection) -> None:
        before = self.manifest
        since = None if before.since_roll_back is None else before.since_roll_back + 1
        self.manifest = replace(
            before,
            updates=before.updates + 1,
            policy_version=done.policy_version,
            samples_used=before.samples_used + done.samples,
            tokens_used=before.tokens_used + done.tokens,
            kd_loss=done.kd_loss if math.isfinite(done.kd_loss) else before.kd_loss,
            since_roll_back=since,
        )
        metrics = self._metrics
        metrics.updates.labels("done").inc()
        metrics.update_seconds.observe(done.seconds)
        metrics.samples_used.inc(done.samples)
        metrics.tokens_used.inc(done.tokens)
        metrics.policy_missed.inc(done.missed)
        metrics.policy_version.set(done.policy_version)
        metrics.kd_loss.set(self.manifest.kd_loss)
        log.info(
            "drafter_updated",
            update=self.manifest.updates,
            samples=done.samples,
            tokens=done.tokens,
            kd_loss=round(self.manifest.kd_loss, 5),
            seconds=round(done.seconds, 3),
            steps=collection.schedule.steps,
        )
