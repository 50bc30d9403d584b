"""What becomes of drafters: candidates are judged and published, published ones watched, and taken back.

The decisions themselves are in gate.py and canary.py; here they are carried out and explained.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import structlog
from redis.exceptions import RedisError

from services.drafter import explain
from services.drafter.canary import Canary, Live, Watch
from services.drafter.checkpoint import CorruptCheckpoint
from services.drafter.collection import Collection
from services.drafter.config import DrafterConfig
from services.drafter.fleet import Fleet
from services.drafter.gate import Judgement, Loading, Verdict, judge
from services.drafter.messages import Compared, Failed
from services.drafter.metrics import DrafterMetrics
from services.drafter.publication import Publication
from services.drafter.record import Published
from services.drafter.study import Study
from services.drafter.training import Training
from services.platform.decisions import Decision, DecisionLog
from services.platform.errors import Aborted, FailedPrecondition, Unavailable
from services.platform.store import OUTAGES
from services.platform.tasks import is_cancelled

log = structlog.get_logger(__name__)

_PAUSE = 0.5
# Decisions that wait to be written; of more, the oldest go.
_MAX_UNTOLD = 1000


class Release:
    """One term's. `compared` is the last comparison; `adopt` a drafter that the learner is to go on from."""

    def __init__(
        self,
        config: DrafterConfig,
        publication: Publication,
        fleet: Fleet,
        study: Study,
        decisions: DecisionLog,
        metrics: DrafterMetrics,
    ) -> None:
        self.publication = publication
        self.compared: Compared | None = None
        self.adopt: Published | None = None
        self._config = config
        self._fleet = fleet
        self._study = study
        self._decisions = decisions
        self._metrics = metrics
        self._canary = self._resumed_canary()
        # Held by whoever changes what is published.
        self._publishing = asyncio.Lock()
        # A version that was found wanting, and that there is nothing to go back from.
        self._condemned = 0
        self._untold: asyncio.Queue[Decision] = asyncio.Queue(_MAX_UNTOLD)

    @property
    def published(self) -> Published | None:
        """What instances are to draft with."""
        return self.publication.published

    async def give_first(self) -> None:
        """Publishes the drafter that the service was given, if nothing was published before."""
        path = self._config.checkpoint
        while self.published is None and path is not None:
            try:
                async with self._publishing:
                    new = await self.publication.give(path)
            except CorruptCheckpoint as error:
                log.error("given_drafter_unreadable", error=str(error))
                return
            except OUTAGES as error:
                log.warning("drafter_not_published", error=str(error))
                await asyncio.sleep(_PAUSE)
            else:
                log.info("drafter_published", version=new.version, path=new.path)
                self._decide(explain.given(new, time.time()))

    async def consider(self, collection: Collection, training: Training) -> None:
        """Whether the drafter as it is now is to be published. Died: the training process is gone."""
        rules = self._config.gate()
        if len(collection.buffer.held_out) < rules.least_rollouts:
            log.info("candidate_waits", held_out=len(collection.buffer.held_out))
            return
        current = self.published
        try:
            compared = await self._study.compare(collection, None if current is None else Path(current.path))
        except Failed as error:
            log.error("candidate_not_measured", error=str(error))
            return
        self._show(compared)
        since = self._study.manifest.since_roll_back
        judgement = judge(compared.candidate, compared.current, compared.samples, since, rules)
        log.info("candidate_judged", verdict=judgement.verdict.value, reason=judgement.reason)
        if judgement.verdict is Verdict.PUBLISH:
            await self._publish(judgement, compared, training)
        elif judgement.verdict is Verdict.REJECT:
            self._study.rejected()
            self._metrics.candidates.labels("rejected").inc()
            version = current.version if current is not None else 0
            updates = self._study.manifest.updates
            self._decide(explain.rejected(judgement, compared, version, updates, time.time()))

    async def roll_back(self, reason: str, version: int = 0) -> Published:
        """Goes back from a version to the drafter before, on request; what is published then. 0: from whatever is.

        Raises:
            Aborted: another version is published.
            FailedPrecondition: there is none before.
            Unavailable: another process leads, or Redis is away.
        """
        try:
            return await self._roll_back("asked", reason or "asked to", version)
        except OUTAGES as error:
            raise Unavailable(f"the drafter could not be taken back: {error}") from error

    async def watch(self) -> None:
        """One look at how the published drafter does."""
        current = self.published
        if current is None:
            return
        live = self._fleet.live(current.version)
        self._metrics.live_acceptance_length.set(live.acceptance_length)
        if self._fleet.loading() is Loading.REFUSED:
            await self._condemn(current, "refused", "instances refuse its checkpoint")
        elif self._canary is not None and self._canary.version == current.version:
            said, reason = self._canary.observe(live, time.time())
            if said is Watch.COLLAPSED:
                await self._condemn(current, "collapsed", reason)
            elif said is Watch.PASSED:
                self._canary = None
                log.info("canary_passed", version=current.version, reason=reason)

    async def keep_record(self) -> None:
        """Sees to it that Redis has the record. Unavailable: another process leads. And what Redis raises."""
        if not self._publishing.locked():
            async with self._publishing:
                await self.publication.keep()

    async def tell(self) -> None:
        """Writes decisions until cancelled."""
        while not is_cancelled():
            await self._decisions.write(await self._untold.get())
        raise asyncio.CancelledError

    async def _publish(self, judgement: Judgement, compared: Compared, training: Training) -> None:
        manifest, current = self._study.manifest, self.published
        before = self._fleet.live(current.version if current is not None else 0)
        try:
            async with self._publishing:
                new = await self.publication.publish(
                    training, compared.candidate, manifest.policy_version, before, self._fleet.highest
                )
        except (CorruptCheckpoint, Failed, OSError, RedisError) as error:
            # The one in use stays; the next candidate is tried as this one was.
            log.error("drafter_not_published", error=str(error))
            return
        self._canary = Canary(new.version, before, new.at, self._config.canary())
        self._metrics.candidates.labels("published").inc()
        log.info("drafter_published", version=new.version, reason=judgement.reason)
        self._decide(explain.published(new, judgement, compared, manifest.updates, time.time()))

    async def _roll_back(self, cause: str, reason: str, version: int = 0) -> Published:
        async with self._publishing:
            now = 0 if self.published is None else self.published.version
            if version and version != now:
                raise Aborted("OTHER_DRAFTER", f"version {now} is published, not {version}", version=str(now))
            left, back = await self.publication.roll_back()
            self._canary = None
        self._study.rolled_back()
        self._metrics.roll_backs.labels(cause).inc()
        log.error(
            "drafter_rolled_back", version=left.version, back_to=back.version, cause=cause, reason=reason
        )
        self._decide(explain.rolled_back(left, back, cause, reason, time.time()))
        self.adopt = back
        return back

    async def _condemn(self, current: Published, cause: str, reason: str) -> None:
        if self._condemned == current.version:
            return
        try:
            await self._roll_back(cause, reason)
        except FailedPrecondition:
            # It stays: instances draft with it, or with what they had. No token depends on it.
            self._canary, self._condemned = None, current.version
            self._metrics.roll_backs.labels(cause).inc()
            log.error("drafter_condemned", version=current.version, cause=cause, reason=reason)
            self._decide(explain.rolled_back(current, None, cause, reason, time.time()))
        except OUTAGES as error:
            log.warning("drafter_not_rolled_back", error=str(error))
            await asyncio.sleep(_PAUSE)

    def _resumed_canary(self) -> Canary | None:
        """Of a drafter that was published by a former leader, and perhaps never watched to the end."""
        current, rules = self.published, self._config.canary()
        if current is None or time.time() - current.at >= rules.seconds:
            return None
        return Canary(current.version, Live(*current.before), current.at, rules)

    def _show(self, compared: Compared) -> None:
        self.compared = compared
        self._metrics.acceptance_length.labels("candidate").set(compared.candidate)
        if compared.current is not None:
            self._metrics.acceptance_length.labels("current").set(compared.current)

    def _decide(self, decision: Decision) -> None:
        """Explains a decision, some time: who decides does not wait for Redis."""
        if self._untold.full():
            log.warning("decision_dropped", kind=self._untold.get_nowait().kind)
        self._untold.put_nowait(decision)
