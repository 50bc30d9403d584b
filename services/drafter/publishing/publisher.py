"""Publisher of drafters: judge a candidate, publish it, watch it, and roll it back if it fails.

The order of publishing is checkpoint, record in Redis, instances. Whichever process dies in between, the record
names a complete checkpoint, and instances load the drafter that the record names. decisions.py decides; the
decision log explains each step.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog
from redis.exceptions import RedisError

from services.contracts import drafter_checkpoint as checkpoints
from services.contracts.drafter_checkpoint import CorruptCheckpoint
from services.contracts.errors import Aborted, FailedPrecondition, Unavailable
from services.contracts.learner import DrafterHistory, PublishedDrafter
from services.drafter.config import DrafterConfig
from services.drafter.metrics import DrafterMetrics
from services.drafter.publishing.decisions import (
    Canary,
    CanaryStatus,
    GateVerdict,
    Judgement,
    LiveAcceptance,
    gate_verdict,
)
from services.drafter.publishing.deployment import Deployment
from services.drafter.training.process import CandidateComparison, TrainingFailed
from services.drafter.training.session import TrainingSession
from services.platform.redis.connection import OUTAGES
from services.platform.redis.decision_log import DecisionLog, DecisionRecord

log = structlog.get_logger(__name__)

PUBLISHED, REJECTED, ROLLED_BACK = "drafter_published", "drafter_rejected", "drafter_rolled_back"
"""Kinds of decision."""
_RETRY_SECONDS = 0.5


class Publisher:
    """Publishes drafters during one term of leadership. `compared` is the last comparison of a candidate."""

    def __init__(
        self,
        config: DrafterConfig,
        deployment: Deployment,
        session: TrainingSession,
        decisions: DecisionLog,
        metrics: DrafterMetrics,
    ) -> None:
        self.compared: CandidateComparison | None = None
        self._config = config
        self._deployment = deployment
        self._session = session
        self._decisions = decisions
        self._metrics = metrics
        self._canary = self._resumed_canary()
        # Held while the record is changed.
        self._publishing = asyncio.Lock()
        # Version that collapsed or was refused although there is no earlier one to roll back to.
        self._condemned = 0

    @property
    def published(self) -> PublishedDrafter | None:
        """The drafter that instances should use."""
        return self._deployment.current

    async def publish_first(self) -> None:
        """Publish the configured checkpoint as it is, if nothing was published before."""
        path = self._config.checkpoint
        while self.published is None and path is not None:
            try:
                async with self._publishing:
                    await asyncio.to_thread(checkpoints.read_config, path)
                    digest = await asyncio.to_thread(checkpoints.digest, path)
                    version = await self._deployment.next_version()
                    new = PublishedDrafter(version, str(path), digest, at=time.time())
                    await self._deployment.put(
                        self._deployment.history.with_published(new, self._config.keep)
                    )
            except CorruptCheckpoint as error:
                log.error("given_drafter_unreadable", error=str(error))
                return
            except OUTAGES as error:
                log.warning("drafter_not_published", error=str(error))
                await asyncio.sleep(_RETRY_SECONDS)
            else:
                log.info("drafter_published", version=new.version, path=new.path)
                self._explain(PUBLISHED, "configured checkpoint", version=new.version, path=new.path)

    async def consider(self) -> None:
        """Publish the current drafter if it passes the gate. TrainingDied: the training process is gone."""
        held_out = len(self._session.samples.buffer.held_out)
        if held_out < self._config.publish_samples:
            log.info("candidate_waits", held_out=held_out)
            return
        current = self.published
        try:
            compared = await self._session.compare(None if current is None else Path(current.path))
        except TrainingFailed as error:
            log.error("candidate_not_measured", error=str(error))
            return
        self.compared = compared
        self._metrics.acceptance_length.labels("candidate").set(compared.candidate)
        if compared.current is not None:
            self._metrics.acceptance_length.labels("current").set(compared.current)
        since = self._session.manifest.since_roll_back
        judgement = gate_verdict(compared.candidate, compared.current, compared.samples, since, self._config)
        log.info("candidate_judged", verdict=judgement.verdict.value, reason=judgement.reason)
        if judgement.verdict is GateVerdict.PUBLISH:
            await self._publish(judgement, compared)
        elif judgement.verdict is GateVerdict.REJECT:
            self._session.count_rejection()
            self._metrics.candidates.labels("rejected").inc()
            version = current.version if current is not None else 0
            self._explain(REJECTED, judgement.reason, version_in_use=version, **self._figures(compared))

    async def watch(self) -> None:
        """Check the live acceptance of the published drafter once, and roll back if it has collapsed."""
        current = self.published
        if current is None:
            return
        live = self._deployment.live(current.version)
        self._metrics.live_acceptance_length.set(live.acceptance_length)
        if self._deployment.refused:
            await self._condemn(current, "refused", "instances refuse its checkpoint")
        elif self._canary is not None and self._canary.version == current.version:
            status, reason = self._canary.observe(live, time.time())
            if status is CanaryStatus.COLLAPSED:
                await self._condemn(current, "collapsed", reason)
            elif status is CanaryStatus.PASSED:
                self._canary = None
                log.info("canary_passed", version=current.version, reason=reason)

    async def roll_back(self, reason: str, version: int = 0) -> PublishedDrafter:
        """Publish the drafter before `version` on request (0: before the published one), and return it.

        Raises:
            Aborted: another version is published.
            FailedPrecondition: no drafter was published before.
            Unavailable: another process leads, or Redis cannot be reached.
        """
        try:
            return await self._roll_back("asked", reason or "requested", version)
        except OUTAGES as error:
            raise Unavailable(f"the drafter could not be rolled back: {error}") from error

    async def restore_record(self) -> None:
        """Write the record again if Redis has lost it. Raises like `Deployment`."""
        if not self._publishing.locked():
            async with self._publishing:
                await self._deployment.restore()

    async def _publish(self, judgement: Judgement, compared: CandidateComparison) -> None:
        current, manifest = self.published, self._session.manifest
        live = self._deployment.live(current.version if current is not None else 0)
        try:
            async with self._publishing:
                # Reserved before the checkpoint is written, so that a version never names two drafters.
                version = await self._deployment.next_version()
                saved = await self._session.save_drafter(version)
                await asyncio.to_thread(checkpoints.verify, saved.path, saved.sha256)
                new = PublishedDrafter(
                    version,
                    str(saved.path.absolute()),
                    saved.sha256,
                    compared.candidate,
                    manifest.policy_version,
                    time.time(),
                    (live.drafts, live.tokens, live.accepted),
                )
                await self._deployment.put(self._deployment.history.with_published(new, self._config.keep))
                # Without an await after `put`: counted and watched before an instance can have loaded it.
                self._canary = Canary(new.version, live, new.at, self._config)
                self._metrics.candidates.labels("published").inc()
        except (CorruptCheckpoint, TrainingFailed, OSError, RedisError) as error:
            # The drafter in use stays, and the next candidate gets its own chance.
            log.error("drafter_not_published", error=str(error))
            return
        log.info("drafter_published", version=new.version, reason=judgement.reason)
        details = {"version": new.version, "path": new.path, "sha256": new.sha256, **self._figures(compared)}
        details["policy_version"] = new.policy_version
        self._explain(PUBLISHED, judgement.reason, judgement.gain, **details)
        try:
            await asyncio.to_thread(self._deployment.prune)
        except OSError as error:
            log.warning("old_drafters_not_removed", error=str(error))

    async def _roll_back(self, cause: str, reason: str, version: int = 0) -> PublishedDrafter:
        async with self._publishing:
            now = 0 if self.published is None else self.published.version
            if version and version != now:
                raise Aborted("OTHER_DRAFTER", f"version {now} is published, not {version}", version=str(now))
            left, back = await self._publish_earlier()
            self._canary = None
        self._session.roll_back_to(back)
        self._metrics.rollbacks.labels(cause).inc()
        log.error(
            "drafter_rolled_back", version=left.version, back_to=back.version, cause=cause, reason=reason
        )
        self._explain(ROLLED_BACK, reason, version=left.version, back_to=back.version, cause=cause)
        return back

    async def _publish_earlier(self) -> tuple[PublishedDrafter, PublishedDrafter]:
        """Publish the latest earlier drafter that can be read; return the replaced and the published one."""
        left, history = self._deployment.current, self._deployment.history
        while (back := history.rolled_back()) is not None and left is not None:
            history = back
            assert history.current is not None, "it was published"
            path, sha256 = Path(history.current.path), history.current.sha256
            try:
                await asyncio.to_thread(checkpoints.verify, path, sha256)
            except CorruptCheckpoint as error:
                log.error("earlier_drafter_unreadable", version=history.current.version, error=str(error))
                continue
            # Its earlier live acceptance says nothing about today's policy.
            current = replace(
                history.current, at=time.time(), before=(0, 0, 0), rolled_back_from=left.version
            )
            await self._deployment.put(DrafterHistory(current, history.earlier))
            return left, current
        raise FailedPrecondition("NO_EARLIER_DRAFTER", "there is no earlier drafter that can be read")

    async def _condemn(self, current: PublishedDrafter, cause: str, reason: str) -> None:
        """Roll back from a drafter that failed, at most once for each version."""
        if self._condemned == current.version:
            return
        try:
            await self._roll_back(cause, reason)
        except FailedPrecondition:
            # It stays the published one, and instances keep what they have. No token depends on it.
            self._canary, self._condemned = None, current.version
            self._metrics.rollbacks.labels(cause).inc()
            log.error("drafter_condemned", version=current.version, cause=cause, reason=reason)
            reason += "; there is no earlier drafter"
            self._explain(ROLLED_BACK, reason, version=current.version, back_to=0, cause=cause)
        except OUTAGES as error:
            log.warning("drafter_not_rolled_back", error=str(error))
            await asyncio.sleep(_RETRY_SECONDS)

    def _resumed_canary(self) -> Canary | None:
        """Return a canary for a drafter that a former leader may not have watched to the end; else None."""
        current = self.published
        if current is None or time.time() - current.at >= self._config.canary_seconds:
            return None
        return Canary(current.version, LiveAcceptance(*current.before), current.at, self._config)

    def _figures(self, compared: CandidateComparison) -> dict[str, Any]:
        return {
            "update": self._session.manifest.updates,
            "candidate_acceptance_length": round(compared.candidate, 4),
            "current_acceptance_length": None if compared.current is None else round(compared.current, 4),
            "held_out_samples": compared.samples,
        }

    def _explain(self, kind: str, reason: str, gain: float = 0.0, **details: Any) -> None:
        self._decisions.post(DecisionRecord(kind, reason, gain, details))
