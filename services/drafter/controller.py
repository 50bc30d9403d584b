"""Work of the leading learner: the training session, the publisher, and the links to instances side by side."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import structlog
from redis.asyncio import Redis

from services.contracts.drafter.record import DrafterHistory
from services.drafter.config import DrafterConfig
from services.drafter.metrics import DrafterMetrics
from services.drafter.publishing.links import DrafterLinks
from services.drafter.publishing.publisher import Publisher
from services.drafter.publishing.record import PublicationRecord
from services.drafter.training.process import TrainingDied, TrainingFailed, TrainingProcess
from services.drafter.training.session import TrainingSession
from services.platform.redis.connection import OUTAGES, Keys
from services.platform.redis.decision_log import DecisionLog
from services.platform.redis.registry import Registry
from services.platform.tasks import is_cancelled, until_one_ends

log = structlog.get_logger(__name__)

_TICK_SECONDS, _STORE_SECONDS, _RETRY_SECONDS = 0.1, 0.5, 2.0


class Overlap:
    """Sums of hidden and other seconds of training. Pure: durations are passed in (seconds).

    Nobody waits for the learner, so the measure is whether anything else was under way. A second of training is
    *hidden* if an instance had samples or weights were being updated meanwhile, or if it lies in a gap between two
    steps, in which the trainer was busy (known when the next step begins, at most `gap` seconds later). All others
    are not hidden, such as those after the last step of a run. What training takes from generation on shared cores
    is not part of this; it shows in the time of the rollouts.
    """

    def __init__(self, gap: float) -> None:
        self.hidden = 0.0
        self.not_hidden = 0.0
        self._gap = gap
        self._idle = 0.0
        self._undecided = 0.0

    def note(self, seconds: float, *, training: bool, busy: bool) -> None:
        """Add a period in which the learner was training or not, with other work under way (`busy`) or not."""
        if busy:
            self.hidden += self._undecided + (seconds if training else 0.0)
            self._undecided = self._idle = 0.0
            return
        self._idle += seconds
        if training:
            self._undecided += seconds
        if self._idle > self._gap:
            self.not_hidden += self._undecided
            self._undecided = 0.0

    @property
    def share(self) -> float:
        """Share of hidden seconds among those that are decided; 1 while there are none."""
        total = self.hidden + self.not_hidden
        return self.hidden / total if total else 1.0


class LearnerController:
    """One term of leadership. Usage: `run` until it is cancelled."""

    def __init__(
        self,
        config: DrafterConfig,
        redis: Redis,
        term: int,
        decisions: DecisionLog,
        metrics: DrafterMetrics,
        learner: str,
        history: DrafterHistory,
    ) -> None:
        """Compose the term; `history` is what former leaders published."""
        record = PublicationRecord(config, redis, term, metrics, history)
        self._config = config
        self._metrics = metrics
        self._links = DrafterLinks(config, Registry(redis, Keys(config.namespace)), record, metrics)
        self.session = TrainingSession(config, redis, term, metrics, TrainingProcess(config, learner))
        self.publisher = Publisher(config, record, self._links, self.session, decisions, metrics)
        self._overlap = Overlap(config.gap_seconds)

    async def run(self) -> None:
        """Train and publish until cancelled. Raises Unavailable when another process leads."""
        works: list[Callable[[], Awaitable[None]]] = [self._links.run, self._watch, self._follow_store]
        if not self._config.frozen:
            works += [self.session.read_feed, self.session.acknowledge, self._train]
        await self.publisher.publish_first()
        try:
            await until_one_ends([asyncio.ensure_future(work()) for work in works])
        finally:
            await self.session.stop()

    async def _train(self) -> None:
        while True:
            try:
                await self.session.start(self.publisher.published)
                while True:
                    await asyncio.sleep(_TICK_SECONDS)
                    await self.session.prepare()
                    if self._may_update() and await self.session.update() and self._should_evaluate():
                        await self.publisher.consider()
            except TrainingFailed as error:
                # The training process could not start. The cause, such as a missing policy, may be put right.
                log.error("learner_not_started", error=str(error))
                await asyncio.sleep(_RETRY_SECONDS)
            except TrainingDied as error:
                await self.session.recover(error)

    def _may_update(self) -> bool:
        return self.session.samples.is_due and (self._config.when == "always" or not self._links.busy)

    def _should_evaluate(self) -> bool:
        return self.session.manifest.updates % self._config.evaluate_every == 0

    async def _follow_store(self) -> None:
        """Follow the published policy versions, and keep the record of drafters in Redis."""
        while not is_cancelled():
            try:
                await self.session.policies.refresh()
                await self.publisher.restore_record()
            except OUTAGES as error:
                log.warning("store_unreachable", error=str(error))
            await asyncio.sleep(_STORE_SECONDS)

    async def _watch(self) -> None:
        before = time.monotonic()
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            now = time.monotonic()
            self._count_time(now - before)
            before = now
            await self.publisher.watch()

    def _count_time(self, seconds: float) -> None:
        overlap, before = self._overlap, (self._overlap.hidden, self._overlap.not_hidden)
        busy = self._links.busy or self.session.policies.updating
        overlap.note(seconds, training=self.session.busy, busy=busy)
        self._metrics.training_seconds.labels("true").inc(overlap.hidden - before[0])
        self._metrics.training_seconds.labels("false").inc(overlap.not_hidden - before[1])
