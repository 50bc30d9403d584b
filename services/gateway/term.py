"""Term of leadership: create and run everything that works while this gateway has the lease."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import structlog
from redis.asyncio import Redis

from services.contracts.learner import read_published
from services.drafts.client import DraftStores
from services.gateway.api.bubble_coordinator import BubbleLink, CoordinatorClient
from services.gateway.api.delivery import Delivery
from services.gateway.api.hints import HintBook, Hinting, HintStore
from services.gateway.api.intake import BatchRecovery, FleetChecks
from services.gateway.api.reports import RewardBook, TrainerReports
from services.gateway.api.run_batches import RunBatches
from services.gateway.api.submissions import OpenBatches, Submissions
from services.gateway.api.tool_calls import ToolCalls
from services.gateway.config import GatewayConfig
from services.gateway.feeds.history import HistoryWriter
from services.gateway.feeds.learner import EndedSingles, LearnerFeed
from services.gateway.instances.roster import Roster
from services.gateway.instances.updater import InFlightSamples, Updater
from services.gateway.journal.fenced_records import Fenced, Leniences, VersionStore
from services.gateway.journal.journal import Journal
from services.gateway.journal.record import RecordedBatches
from services.gateway.journal.writer import JournalBacklog, JournalWriter, RedisHeadroom
from services.gateway.metrics import GatewayMetrics
from services.gateway.scheduler.active_batches import ActiveBatches
from services.gateway.scheduler.estimator import WorkEstimator
from services.gateway.scheduler.instance_events import InstanceEvents
from services.gateway.scheduler.placer import Placer
from services.gateway.scheduler.scheduler import Scheduler
from services.gateway.scheduler.turns import Turns
from services.gateway.state.fleet_health import FleetHealth
from services.gateway.state.messages import BatchBuilder
from services.gateway.state.update_book import UpdateBook
from services.platform.memory import collect_between
from services.platform.redis.connection import OUTAGES, Keys
from services.platform.redis.decision_log import DecisionLog
from services.platform.redis.registry import Registry
from services.platform.tasks import end, is_cancelled

log = structlog.get_logger(__name__)

# Seconds between two reads of the drafter's version.
_VERSION_CHECK_SECONDS = 1.0


class LeadershipTerm:
    """Composition root of everything that must not be done by two gateways at once.

    Create it with `open`, then `run` it. When `run` ends, by cancellation or because another gateway has
    taken over, all work of the term has ended.
    """

    def __init__(
        self,
        config: GatewayConfig,
        redis: Redis,
        term: int,
        book: UpdateBook,
        versions: VersionStore,
        metrics: GatewayMetrics,
        paused: Callable[[bool], Awaitable[None]],
    ) -> None:
        """`paused` gets True when work pauses because Redis does not accept finished samples, and False after."""
        self._config, self._redis, self._metrics = config, redis, metrics
        self._paused = paused
        self._registry = Registry(redis, Keys(config.namespace))
        self.fleet = FleetHealth()
        self.book = book
        if book.published is not None:
            self.fleet.publish(book.published.version, recorded=book.published.recorded, now=0.0)
        # In order: each step needs the objects of the previous ones.
        self._create_journal(term)
        self._create_feeds(term)
        self._create_scheduler()
        self._create_connections(versions)
        self._create_hints()
        self._create_handlers()

    def _create_journal(self, term: int) -> None:
        config, metrics = self._config, self._metrics
        self.journal = Journal(
            self._redis, config.namespace, term, config.retention_seconds, config.acknowledged_seconds
        )
        self._records = RecordedBatches(config.max_result_bytes)
        self._backlog = JournalBacklog(config.max_unwritten_bytes, metrics)
        self._headroom = RedisHeadroom(self._redis, config.max_redis_memory, self._backlog, metrics)

    def _create_feeds(self, term: int) -> None:
        """Create the consumers of finished samples: decision log, rewards, draft stores, learner."""
        config, redis, metrics = self._config, self._redis, self._metrics
        self.decisions = DecisionLog(redis, config.namespace)
        self.rewards = RewardBook(self.decisions.post)
        self._leniences = Leniences(redis, config.namespace, str(term), metrics)
        self._stores = DraftStores(config, self._registry)
        self._history = HistoryWriter(self._stores, metrics) if config.history else None
        self.feed = LearnerFeed(config, redis, self._registry, metrics) if config.learner_feed else None
        self.drafter_version = 0
        """Version of the published drafter, as last read; 0 if there is none."""
        self._singles = EndedSingles()

    def _create_scheduler(self) -> None:
        config, metrics = self._config, self._metrics
        self._writer = JournalWriter(
            self.journal, self._records, self._backlog, metrics, config.journal_tokens
        )
        self.batches = ActiveBatches(metrics, config.max_queued_samples, config.max_token_bytes)
        self.estimator = WorkEstimator(config.draft_cost)
        self.placer = Placer(
            self.batches, self.estimator, self.fleet, metrics, self._backlog, config.affinity_slack
        )
        turns = Turns()
        self.scheduler = Scheduler(
            self.batches,
            self.estimator,
            self.placer,
            self._writer,
            turns,
            metrics,
            self._history,
            self.feed,
            self._singles,
            self.decisions.post,
            config.abort_timeout_seconds,
        )
        self.events = InstanceEvents(
            self.batches,
            self.estimator,
            self.placer,
            self.scheduler,
            turns,
            self.fleet,
            metrics,
            config.claim_wait_seconds,
        )

    def _create_connections(self, versions: VersionStore) -> None:
        book, metrics = self.book, self._metrics
        self.roster = Roster(
            self._config, self._registry, self.fleet, book, self.events, self.placer, metrics
        )
        in_flight = InFlightSamples(book, self.scheduler, metrics)
        self.updater = Updater(
            book, versions, self.fleet, self.roster, in_flight, metrics, self.decisions.post
        )

    def _create_hints(self) -> None:
        config = self._config
        hints = HintBook(config.max_hint_steps, config.max_hint_bytes)
        store = HintStore(self._redis, config.namespace, config.run_idle_seconds)
        self.hinting = Hinting(config, hints, store, self.batches, self._metrics)
        self.coordinator = CoordinatorClient(config, self._registry, self.batches.progress.set)
        lengths, timeout = self.estimator.lengths, config.coverage_timeout_seconds
        self._bubbles = BubbleLink(self.coordinator, hints, self.batches, lengths, self.book, timeout)

    def _create_handlers(self) -> None:
        config, metrics = self._config, self._metrics
        builder = BatchBuilder(
            config.max_batch_seconds, config.max_attempts, config.max_calls, config.call_wait_seconds
        )
        checks = FleetChecks(self.fleet, self.book, self.batches.accounts, config.max_message_bytes)
        self.recovery = BatchRecovery(
            self.journal, self._records, self.batches, self.scheduler, builder, self.book, self.hinting
        )
        self.open_batches = OpenBatches(
            checks,
            self.journal,
            self._headroom,
            self.batches,
            self.scheduler,
            self.recovery,
            metrics,
            config.max_open_batch_samples,
            config.open_batch_idle_seconds,
        )
        self.submissions = Submissions(
            checks,
            self.journal,
            self._records,
            self._headroom,
            self.batches,
            self.scheduler,
            self._leniences,
            builder,
            self.recovery,
            self.hinting,
            self._bubbles,
            self.open_batches,
        )
        self.delivery = Delivery(
            checks,
            self.journal,
            self._records,
            self.batches,
            self.scheduler,
            self._leniences,
            builder,
            self.recovery,
            self.hinting,
        )
        self.tool_calls = ToolCalls(checks, self.batches, self.scheduler, self.recovery, metrics)
        self.runs = RunBatches(
            self._records, self.batches, self.recovery, self.submissions, self.delivery, self.hinting
        )
        self.reports = TrainerReports(
            self.recovery, self._leniences, metrics, self.feed, self._singles, self.rewards
        )

    @classmethod
    async def open(
        cls,
        config: GatewayConfig,
        redis: Redis,
        term: int,
        metrics: GatewayMetrics,
        paused: Callable[[bool], Awaitable[None]],
    ) -> "LeadershipTerm":
        """Create a term and restore the state of former terms.

        `term` is higher than the term of every former leader. Raises the errors of Redis, and FailedPrecondition if
        the journal has another format.
        """
        versions = VersionStore(redis, config.namespace, str(term))
        book = await versions.load(config.update_timeout_seconds)
        opened = cls(config, redis, term, book, versions, metrics, paused)
        await opened.journal.check_format()
        await opened.hinting.recover()
        await opened.recovery.recover()
        return opened

    @staticmethod
    async def check(config: GatewayConfig, redis: Redis) -> None:
        """Read what `open` reads first, and raise its errors. It changes nothing, so that a standby may call it."""
        await VersionStore(redis, config.namespace, "").load(config.update_timeout_seconds)
        journal = Journal(redis, config.namespace, 0, config.retention_seconds, config.acknowledged_seconds)
        await journal.check_format(record=False)
        await journal.unfinished()

    async def run(self) -> None:
        """Work until cancelled, or until another gateway has taken over."""
        tasks = [
            asyncio.create_task(self._writer.run(self.scheduler), name="journal-writer"),
            asyncio.create_task(self._headroom.run(), name="headroom"),
            asyncio.create_task(self._follow_backlog(), name="backlog"),
            asyncio.create_task(self.roster.run(), name="roster"),
            asyncio.create_task(self.updater.run(), name="updater"),
            asyncio.create_task(self._unlist(), name="unlist"),
            asyncio.create_task(self.open_batches.run(), name="open-batches"),
            asyncio.create_task(self.tool_calls.run(), name="tool-calls"),
        ]
        optional = {
            "hints": self.hinting.run(),
            "coordinator": self.coordinator.run(),
            "bubbles": self._bubbles.run(),
            "drafter-version": self._follow_drafter_version(),
            "decisions": self.decisions.run(),
            "rewards": self.rewards.run(),
            "collection": collect_between(lambda: max(self.batches.held, self.batches.unfinished)),
        }
        if self._history is not None:
            optional |= {"draft-stores": self._stores.run(), "history": self._history.run()}
        if self.feed is not None:
            optional["learner-feed"] = self.feed.run()
        background = [asyncio.create_task(_contained(work), name=name) for name, work in optional.items()]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except Fenced as fenced:
            log.warning("fenced", reason=str(fenced))
        finally:
            self.recovery.close()
            for running in list(self.batches.by_key.values()):
                self.scheduler.drop(running)
            try:
                await end((*tasks, *background))
            finally:
                self._backlog.clear()
                await self._paused(False)
                await self._stores.close()

    async def _follow_backlog(self) -> None:
        """Report pauses, and place samples after them."""
        while True:
            changed = self._backlog.changed.next_change()
            self.placer.pump_soon()
            await self._paused(self._backlog.paused)
            await changed.wait()

    async def _follow_drafter_version(self) -> None:
        """Read the version of the published drafter, even without a learner; keep the last one in an outage."""
        while not is_cancelled():
            try:
                published = await read_published(self._redis, self._config.namespace)
                self.drafter_version = published.version if published is not None else 0
            except OUTAGES as error:
                log.debug("drafter_version_unreadable", error=str(error))
            await asyncio.sleep(_VERSION_CHECK_SECONDS)

    async def _unlist(self) -> None:
        """Remove finished batches from the list of unfinished ones; if that fails, a later gateway does it."""
        while True:
            key = await self.batches.finished.get()
            with contextlib.suppress(*OUTAGES):
                await self.journal.unlist(key)


async def _contained(work: Awaitable[None]) -> None:
    """Await optional work: an error ends this work, but not the term."""
    try:
        await work
    except Exception:
        log.exception("background_work_failed")
