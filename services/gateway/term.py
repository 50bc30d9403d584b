"""One term of leadership: all that works while this gateway has the lease."""

import asyncio
import contextlib
from collections.abc import Awaitable

import structlog
from redis.asyncio import Redis

from services.drafts.client import DraftStores
from services.gateway.bubbles import BubbleLink
from services.gateway.config import GatewayConfig
from services.gateway.dispatcher import Dispatcher
from services.gateway.feed import LearnerFeed
from services.gateway.fleet import Fleet
from services.gateway.hint_store import HintStore
from services.gateway.hinting import Hinting
from services.gateway.history import History
from services.gateway.journal import Fenced, Journal
from services.gateway.lenience import Leniences
from services.gateway.metrics import GatewayMetrics
from services.gateway.rewards import Rewards
from services.gateway.rollouts import Rollouts
from services.gateway.roster import Roster
from services.gateway.update import UpdateBook
from services.gateway.updater import Updater
from services.gateway.versions import VersionStore
from services.gateway.writer import JournalWriter
from services.platform.registry import Registry
from services.platform.store import OUTAGES, Keys
from services.platform.tasks import end

log = structlog.get_logger(__name__)


class Term:
    """Everything that must not be done by two gateways at once. Build it with `open`, then `run` it; when
    `run` ends, by cancellation or because it was fenced, nothing of the term goes on."""

    def __init__(
        self,
        config: GatewayConfig,
        redis: Redis,
        token: str,
        book: UpdateBook,
        versions: VersionStore,
        metrics: GatewayMetrics,
    ) -> None:
        self.book = book
        self.fleet = Fleet()
        if book.published is not None:
            self.fleet.publish(book.published.version, recorded=bool(book.published.path), now=0.0)
        self.dispatcher = Dispatcher(config, self.fleet, metrics)
        self.journal = Journal(redis, config.namespace, token, config.retention_seconds)
        self._writer = JournalWriter(self.journal, metrics, self.dispatcher.written, self.dispatcher.gone)
        self.dispatcher.journal_with(self._writer)
        registry = Registry(redis, Keys(config.namespace))
        self.roster = Roster(config, registry, self.fleet, book, self.dispatcher, metrics)
        self.updater = Updater(config, book, versions, self.fleet, self.roster, self.dispatcher, metrics)
        leniences = Leniences(redis, config.namespace, token, metrics)
        store = HintStore(redis, config.namespace, config.run_idle_seconds)
        self.hinting = Hinting(config, store, self.dispatcher, metrics)
        self.bubbles = BubbleLink(config, registry, self.hinting.book, self.dispatcher, book)
        self.rollouts = Rollouts(
            config,
            self.journal,
            self.dispatcher,
            self.fleet,
            book,
            leniences,
            self.hinting,
            self.bubbles,
        )
        self.feed = LearnerFeed(config, redis, registry, metrics) if config.learner_feed else None
        if self.feed is not None:
            self.dispatcher.teach_with(self.feed)
        self.rewards = Rewards(self.journal, leniences, metrics, self.feed)
        self._stores = DraftStores(config, registry)
        self._history = History(self._stores, metrics) if config.history else None
        if self._history is not None:
            self.dispatcher.remember_with(self._history)

    @classmethod
    async def open(cls, config: GatewayConfig, redis: Redis, token: str, metrics: GatewayMetrics) -> "Term":
        """Reads what former terms left. Raises what Redis raises."""
        versions = VersionStore(redis, config.namespace, token)
        book = await versions.load(config.update_timeout_seconds)
        term = cls(config, redis, token, book, versions, metrics)
        await term.hinting.recover()
        await term.rollouts.recover()
        return term

    async def run(self) -> None:
        """Works until cancelled, or until another gateway has taken over."""
        tasks = [
            asyncio.create_task(self._writer.run(), name="journal-writer"),
            asyncio.create_task(self.roster.run(), name="roster"),
            asyncio.create_task(self.updater.run(), name="updater"),
            asyncio.create_task(self._unlist(), name="unlist"),
        ]
        beside = [
            asyncio.create_task(_unharmed(self.hinting.run()), name="hints"),
            asyncio.create_task(_unharmed(self.bubbles.coordinator.run()), name="coordinator"),
            asyncio.create_task(_unharmed(self.bubbles.run()), name="bubbles"),
        ]
        if self._history is not None:
            beside.append(asyncio.create_task(_unharmed(self._stores.run()), name="draft-stores"))
            beside.append(asyncio.create_task(_unharmed(self._history.run()), name="history"))
        if self.feed is not None:
            beside.append(asyncio.create_task(_unharmed(self.feed.run()), name="learner-feed"))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except Fenced as fenced:
            log.warning("fenced", reason=str(fenced))
        finally:
            for running in list(self.dispatcher.batches.values()):
                self.dispatcher.drop(running)
            try:
                await end((*tasks, *beside))
            finally:
                await self._stores.close()

    async def _unlist(self) -> None:
        """Takes finished batches off the list of unfinished ones; if that fails, a later gateway does it."""
        while True:
            await self.dispatcher.changed.wait()
            finished, self.dispatcher.finished = self.dispatcher.finished, []
            for key in finished:
                with contextlib.suppress(*OUTAGES):
                    await self.journal.unlist(key)


async def _unharmed(work: Awaitable[None]) -> None:
    """What the term can do without: a mistake in it costs itself only."""
    try:
        await work
    except Exception:
        log.exception("background_work_failed")
