"""Process of the learner: gRPC service of every process, and controller of the one that leads.

For one term of leadership the controller runs the training session, the publisher and the links to instances.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import structlog
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis

from paceline.internal.v1 import drafter_pb2 as pb
from paceline.internal.v1 import drafter_pb2_grpc as rpc
from paceline.times import timestamp
from services.contracts.learner import DrafterHistory, DrafterKeys, read_history
from services.drafter.config import DrafterConfig
from services.drafter.metrics import DrafterMetrics
from services.drafter.publishing.deployment import Deployment
from services.drafter.publishing.publisher import Publisher
from services.drafter.training.process import LEARNER, TrainingDied, TrainingFailed, TrainingProcess
from services.drafter.training.session import TrainingSession
from services.platform.leading import LeadingServer
from services.platform.redis.connection import OUTAGES
from services.platform.redis.decision_log import DecisionLog
from services.platform.tasks import is_cancelled, until_one_ends

log = structlog.get_logger(__name__)

_TICK_SECONDS, _STORE_SECONDS, _RETRY_SECONDS = 0.1, 0.5, 2.0


class Overlap:
    """Sums of hidden and other seconds of training. Pure: durations are passed in (seconds).

    No other process waits for the learner, so a second of training costs nothing while other work is under way. It
    is *hidden* if an instance had samples or weights were being updated meanwhile, or if it lies in a gap between
    two steps, in which the trainer was busy (known when the next step begins, at most `gap` seconds later). All
    other seconds are not hidden, such as those after the last step of a run. Slower generation because of shared
    cores is not counted here; it shows in the time of the rollouts.
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
        """Share of hidden seconds among all classified seconds; 1 while there are none."""
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
        """Compose the term; `history` lists the drafters that former leaders published."""
        self._config = config
        self._metrics = metrics
        self._deployment = Deployment(config, redis, term, metrics, history)
        self.session = TrainingSession(config, redis, term, metrics, TrainingProcess(config, learner))
        self.publisher = Publisher(config, self._deployment, self.session, decisions, metrics)
        self._overlap = Overlap(config.gap_seconds)

    async def run(self) -> None:
        """Train and publish until cancelled. Raises Unavailable when another process leads."""
        works: list[Callable[[], Awaitable[None]]] = [self._deployment.run, self._watch, self._follow_store]
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
                # The training process could not start; the cause, such as a missing policy, may be removed.
                log.error("learner_not_started", error=str(error))
                await asyncio.sleep(_RETRY_SECONDS)
            except TrainingDied as error:
                await self.session.recover(error)

    def _may_update(self) -> bool:
        return self.session.samples.is_due and (self._config.when == "always" or not self._deployment.busy)

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
        busy = self._deployment.busy or self.session.policies.updating
        overlap.note(seconds, training=self.session.busy, busy=busy)
        self._metrics.training_seconds.labels("true").inc(overlap.hidden - before[0])
        self._metrics.training_seconds.labels("false").inc(overlap.not_hidden - before[1])


SERVICE = "drafter"
"""Name in the registry."""
Context = grpc.aio.ServicerContext[Any, Any]


class LearnerService(rpc.LearnerServiceServicer):
    """Serves the learner. `leading` returns the controller, or raises Unavailable while another process leads."""

    def __init__(self, leading: Callable[[], LearnerController]) -> None:
        self._leading = leading

    async def GetLearner(self, request: pb.GetLearnerRequest, context: Context) -> pb.GetLearnerResponse:
        """Return the progress of training, and the published drafter."""
        controller = self._leading()
        manifest, current = controller.session.manifest, controller.publisher.published
        compared = controller.publisher.compared
        response = pb.GetLearnerResponse(
            policy_version=manifest.policy_version,
            updates=manifest.updates,
            samples_used=manifest.samples_used,
            tokens_used=manifest.tokens_used,
            kd_loss=manifest.kd_loss,
            rejected_candidates=manifest.rejected,
            rollbacks=manifest.rollbacks,
        )
        if compared is not None:
            response.candidate_acceptance_length = compared.candidate
            response.current_acceptance_length = compared.current or 0.0
        if current is not None:
            response.drafter_version, response.path, response.sha256 = (
                current.version,
                current.path,
                current.sha256,
            )
            response.published_at.CopyFrom(timestamp(current.at))
        return response

    async def RollBack(self, request: pb.RollBackRequest, context: Context) -> pb.RollBackResponse:
        """Publish the previous drafter."""
        published = await self._leading().publisher.roll_back(request.reason, request.drafter_version)
        return pb.RollBackResponse(drafter_version=published.version)


class DrafterProcess(LeadingServer[LearnerController]):
    """Composition root of the service. Usage: `start`, then `run` until it is cancelled, then `stop`."""

    def __init__(
        self,
        config: DrafterConfig,
        registry: CollectorRegistry,
        metrics_port: int = 0,
        learner: str = LEARNER,
    ) -> None:
        """Build the process. `learner` names the class that learns, as "module:class"."""
        self._config = config
        self._metrics = DrafterMetrics(registry)
        self._learner = learner
        super().__init__(
            config,
            SERVICE,
            config.instance_id,
            title="learner",
            lease=DrafterKeys(config.namespace).lease,
            open_term=self._open,
            leader=self._metrics.leader,
            registry=registry,
            metrics_port=metrics_port,
        )
        self._decisions = DecisionLog(self.redis, config.namespace)
        self.work.append(self._decisions.run)
        rpc.add_LearnerServiceServicer_to_server(LearnerService(self.leadership.leading), self.server.server)

    async def _open(self, term: int) -> LearnerController:
        """Begin a term with the history that former leaders left. Raises Redis errors."""
        history = await read_history(self.redis, self._config.namespace)
        return LearnerController(
            self._config, self.redis, term, self._decisions, self._metrics, self._learner, history
        )
