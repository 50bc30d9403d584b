"""Begin, cancel, expire, deliver and drop batches, and apply the effects of events to their samples."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import structlog

from paceline.v1 import sample_pb2
from services.contracts.gateway_keys import BatchKey
from services.gateway.feeds.history import HistoryWriter
from services.gateway.feeds.learner import EndedSingles, LearnerFeed
from services.gateway.feeds.step_report import IdleTimeBook, StepReport, TimedSample, step_record
from services.gateway.journal.writer import JournalWriter
from services.gateway.metrics import GatewayMetrics
from services.gateway.scheduler.active_batches import ActiveBatches, RunningBatch
from services.gateway.scheduler.estimator import Coverage, WorkEstimator
from services.gateway.scheduler.placer import Placer
from services.gateway.scheduler.turns import Steps, Turns
from services.gateway.scheduler.work_link import Attempt
from services.gateway.state.rollout_batch import RolloutBatch
from services.gateway.state.sample import BatchGroup, EventEffect, GatewaySample, SampleEnding, SamplePhase
from services.platform.redis.decision_log import DecisionRecord

log = structlog.get_logger(__name__)

# Samples of one batch rank within this range after its order.
_ORDER_STEP = 1 << 32
# Larger groups keep their positions in the queue: better ones are not worth a walk over the group at each end.
_MOST_SIBLINGS = 256


@dataclass(eq=False)
class Scheduler:
    """Life of all batches in work, and of their samples from the queue to the journal.

    Completed and truncated samples go to `history` (the draft store) and `feed` (the learner), if there are any.
    `record` writes to the decision log. A cancelled sample ends after `abort_seconds` even if its instance has not
    answered.
    """

    batches: ActiveBatches
    estimator: WorkEstimator
    placer: Placer
    writer: JournalWriter
    turns: Turns
    metrics: GatewayMetrics
    history: HistoryWriter | None
    feed: LearnerFeed | None
    singles: EndedSingles
    record: Callable[[DecisionRecord], None]
    abort_seconds: float
    _orders: int = field(init=False, default=0)
    _steps: IdleTimeBook = field(init=False, default_factory=IdleTimeBook)

    # Batches -------------------------------------------------------------------------------------------

    def add(
        self, batch: RolloutBatch, *, private: bool = False, events: int = 0, coverage: Coverage | None = None
    ) -> RunningBatch:
        """Begin or resume a batch.

        Args:
            batch: the batch.
            private: it is the single sample of a Generate call.
            events: number of its samples that are in the journal already.
            coverage: existing drafts of its samples; None: its step was not hinted.
        """
        self._orders += _ORDER_STEP
        running = RunningBatch(batch, self._orders, private, events)
        self.batches.add(running)
        self.batches.count(batch.account, batch.unfinished, batch.most_tokens)
        run_id = batch.key[0]
        if private:
            hinted, version = coverage is not None, batch.current_version
            running.in_step, reports = self._steps.begin_single(
                run_id,
                batch.step,
                batch.accepted_at,
                hinted=hinted,
                version=version,
                resumed=bool(batch.groups[0].prefix),
            )
            for report in reports:
                self._report(report)
        else:
            if coverage is not None:
                self.estimator.cover(batch, coverage)
            pregenerated = None if coverage is None else 0
            self._begin_in_step(batch, batch.unfinished, batch.accepted_at, pregenerated)
            self.metrics.show_run(run_id, time.time(), step=batch.step)
        running.call_later(max(0.0, batch.deadline_at - time.time()), self._expire, running)
        self.turns.run(self._enqueue(running, range(len(batch.samples))))
        return running

    def extend(
        self, running: RunningBatch, groups: Sequence[BatchGroup], samples: Sequence[GatewaySample]
    ) -> None:
        """Begin samples that were added to an open batch."""
        batch, first = running.batch, len(running.batch.samples)
        batch.groups.extend(groups)
        batch.samples.extend(samples)
        most_tokens = sum(group.count * group.most_tokens for group in groups)
        batch.most_tokens += most_tokens
        self.batches.grow(batch, len(samples), most_tokens)
        pregenerated = 0 if self.estimator.knows(batch) else None
        self._begin_in_step(batch, len(samples), time.time(), pregenerated)
        added = range(first, len(batch.samples))
        self.turns.run(self._enqueue(running, added))
        # Its version was replaced, or its deadline passed, after the samples were checked.
        if batch.superseded:
            self.cancel(running, added, keep_partial=True)
        elif running.expired:
            self._expire(running, first)

    def close(self, running: RunningBatch) -> None:
        """Let an open batch end with its last sample."""
        self.batches.close(running)
        self._end_feeding(running.batch)
        self.journaled(running.batch.key, running.events)

    def cancel(
        self, running: RunningBatch, indexes: Iterable[int], keep_partial: bool
    ) -> asyncio.Future[int]:
        """End samples as ABORTED, now or when their instance has answered; the result is their number."""
        return self.turns.run(self._cancel(running, indexes, keep_partial))

    def continue_under(self, running: RunningBatch, version: int | None) -> None:
        """Let unfinished samples of a batch continue under another version; None: end them as ABORTED."""
        batch = running.batch
        if version is None:
            batch.superseded = True
            self.cancel(running, range(len(batch.samples)), keep_partial=True)
        elif version != batch.current_version:
            batch.current_version = version
            self.turns.run(self._requeue(running))

    def weights_updated(self, run_id: str, begin: float, end: float) -> None:
        """Count an update of weights, in unix seconds, to the time that the run's next step waited for it.

        It ends the run's step of single samples.
        """
        for report in self._steps.pass_on(run_id):
            self._report(report)
        self._steps.updated(run_id, begin, end)

    def forget_run(self, run_id: str) -> None:
        """Report the step of single samples of a run that has ended, and forget the run."""
        for report in self._steps.forget(run_id):
            self._report(report)

    def drop(self, running: RunningBatch) -> None:
        """Forget a batch, and abort its samples on instances."""
        batch = running.batch
        if self.batches.by_key.get(batch.key) is not running:
            return
        running.stop_timers()
        running.dropped = True
        running.trace.end(delivered=running.events)
        self.batches.remove(running)
        self.batches.count(batch.account, -batch.unfinished, -batch.most_tokens)
        self.estimator.forget(batch)
        if running.in_step:
            report = self._steps.drop(batch.key[0], batch.step, batch.unfinished, single=running.private)
            if report is not None:
                self._report(report)
        self.batches.progress.set()
        running.changed.notify()
        self.turns.run(self._clear(running))

    def _enqueue(self, running: RunningBatch, indexes: Iterable[int]) -> Steps:
        now = time.monotonic()
        for index in indexes:
            if running.dropped:
                return
            sample = running.batch.samples[index]
            if sample.phase is SamplePhase.CALLING:
                if sample.cancelled:
                    self._abort(running, index)
                else:
                    running.calls.add(index, now)
            if sample.phase is SamplePhase.WAITING:
                if sample.cancelled:
                    self._abort(running, sample.index)
                else:
                    self.placer.enqueue(running, sample.index)
            yield
        self.save(running)
        # Not earlier, so that the longest sample is placed first.
        self.placer.pump_soon()

    def _requeue(self, running: RunningBatch) -> Steps:
        """Move the waiting samples of a batch to the queue of its current version; end or renew stale ones."""
        stale = []
        for index in range(len(running.batch.samples)):
            if running.dropped:
                return
            if running.batch.is_stale(index):
                if running.batch.regenerates:
                    self._renew(running, index)
                else:
                    stale.append(index)
            elif (running, index) in self.placer.queue:
                self.placer.enqueue(running, index)
            yield
        if stale:
            self.metrics.stale_samples.labels("aborted").inc(len(stale))
            self.cancel(running, stale, keep_partial=True)
        self.placer.pump_soon()

    def _renew(self, running: RunningBatch, index: int) -> None:
        """Generate an unfinished sample again, from its first token."""
        if running.batch.samples[index].cancelled:
            return
        if index in running.places:
            link, handle = running.places[index]
            link.abort(handle)
        self.metrics.stale_samples.labels("regenerated").inc()
        self._settle(running, index, running.batch.renew(index))

    def _cancel(
        self, running: RunningBatch, indexes: Iterable[int], keep_partial: bool
    ) -> Generator[None, None, int]:
        cancelled, requested = 0, []
        for index in indexes:
            if running.dropped:
                break
            phase = running.batch.cancel(index, keep_partial)
            cancelled += phase is not SamplePhase.ENDED
            if phase is SamplePhase.ASSIGNED and index in running.places:
                link, handle = running.places[index]
                link.abort(handle)
                requested.append(index)
            elif phase is not SamplePhase.ENDED:
                # It waits, or is moving to another instance, where it will be claimed only to be aborted.
                self.placer.queue.discard((running, index))
                self._abort(running, index)
            yield
        if not running.dropped:
            if requested:
                running.call_later(self.abort_seconds, self._abort_unanswered, running, requested)
            self.save(running)
        return cancelled

    def _abort(self, running: RunningBatch, index: int) -> EventEffect:
        effect = running.batch.abort(index, time.time())
        self._settle(running, index, effect)
        return effect

    def _abort_unanswered(self, running: RunningBatch, indexes: Iterable[int]) -> None:
        self.turns.run(self._abort_all(running, indexes))

    def _abort_all(self, running: RunningBatch, indexes: Iterable[int]) -> Steps:
        unanswered = 0
        for index in indexes:
            if running.dropped:
                return
            unanswered += self._abort(running, index) is EventEffect.ENDED
            yield
        if unanswered:
            log.warning("abort_unanswered", batch=running.batch.key, samples=unanswered)
            self.save(running)

    def _expire(self, running: RunningBatch, first: int = 0) -> None:
        """End the samples from index `first` on: the deadline has passed."""
        running.expired = True
        expiring = self.cancel(running, range(first, len(running.batch.samples)), keep_partial=True)
        expiring.add_done_callback(partial(self._expired, running))

    def _expired(self, running: RunningBatch, expiring: asyncio.Future[int]) -> None:
        if not expiring.cancelled() and (samples := expiring.result()):
            log.warning("deadline_passed", batch=running.batch.key, samples=samples)
            self.metrics.expired.inc(samples)

    def _clear(self, running: RunningBatch) -> Steps:
        """Remove the samples of a dropped batch from the queue and from their instances, and free them."""
        if running.batch.unfinished:
            for index in range(len(running.batch.samples)):
                self.placer.queue.discard((running, index))
                yield
        while running.places:
            _, (link, handle) = running.places.popitem()
            link.abort(handle)
            yield
        # One by one: freeing all at once would take long.
        last_references = [*running.batch.samples, *running.batch.groups]
        del running
        while last_references:
            last_references.pop()
            yield

    # Progress of the journal ---------------------------------------------------------------------------

    def journaled(self, key: BatchKey, events: int) -> None:
        """Wake readers: `events` finished samples of the batch are now durable.

        The batch ends with its last sample, unless it is open.
        """
        running = self.batches.by_key.get(key)
        if running is None:
            return
        running.events = events
        if events >= len(running.batch.samples) and not running.batch.open:
            self.metrics.batch_seconds.observe(time.time() - running.batch.accepted_at)
            log.info("batch_finished", batch=key, samples=running.events)
            self.drop(running)
            self.batches.finished.put_nowait(key)
        else:
            running.notify_soon(self.batches.delivery_interval)

    def extended(self, key: BatchKey, tokens: Iterable[tuple[int, float]]) -> None:
        """Deliver tool calls, and acknowledge answers to them, whose tokens are now durable."""
        running = self.batches.by_key.get(key)
        if running is None or running.batch.tools is None:
            return
        before, now = len(running.calls), time.monotonic()
        for index, count in tokens:
            sample = running.batch.samples[index]
            running.safe(index, count)
            if sample.phase is SamplePhase.CALLING and count == len(sample.tokens):
                running.calls.add(index, now)
        if len(running.calls) > before:
            running.notify_soon(self.batches.delivery_interval)

    def reopen(self, key: BatchKey, indexes: list[int]) -> None:
        """Generate ended samples again, from their seeds, because the journal has lost them."""
        running = self.batches.by_key.get(key)
        if running is None:
            return
        if indexes:
            log.warning("samples_lost_by_journal", batch=key, samples=len(indexes))
            self.metrics.resubmissions.labels("journal").inc(len(indexes))
            self.turns.run(self._reopen(running, indexes))
        self.writer.touch(running.batch)

    def taken(self, key: BatchKey) -> None:
        """Drop a batch that a successor has taken over."""
        running = self.batches.by_key.get(key)
        if running is not None:
            self.drop(running)

    def _reopen(self, running: RunningBatch, indexes: Iterable[int]) -> Steps:
        batch = running.batch
        for index in indexes:
            if running.dropped:
                return
            batch.reopen(index)
            self.batches.count(batch.account, 1, batch.group_of(index).most_tokens)
            self._begin_in_step(batch, 1, time.time())
            if batch.superseded:
                batch.cancel(index, keep_partial=True)
            if batch.samples[index].cancelled:
                self._abort(running, index)
            else:
                self.placer.enqueue(running, index)
            yield
        # The deadline may have passed after the samples had ended.
        running.call_later(max(0.0, batch.deadline_at - time.time()), self._expire, running)
        self.save(running)
        self.placer.pump_soon()

    # Samples -------------------------------------------------------------------------------------------

    def answer(self, running: RunningBatch, index: int, tokens: Sequence[int]) -> asyncio.Future[None]:
        """Continue a calling sample with tokens of its environment; the future is done once they are durable."""
        since = running.calls.discard(index)
        if since is not None:
            self.metrics.call_seconds.observe(time.monotonic() - since)
        running.batch.answer(index, tokens)
        safe = running.wait_safe(index)
        self.placer.enqueue(running, index)
        self.save(running)
        self.placer.pump_soon()
        return safe

    def end_call(
        self, running: RunningBatch, index: int, reason: sample_pb2.FinishReason
    ) -> asyncio.Future[None]:
        """End a calling sample with its current tokens; the future is done once that is durable."""
        safe = running.wait_safe(index)
        self._settle(running, index, running.batch.end_call(index, reason, time.time()))
        self.save(running)
        return safe

    def take_back(self, attempt: Attempt, effect: EventEffect, cause: str = "") -> None:
        """Requeue a sample that has left its instance, or account for its end.

        `cause` is the reason to resume it elsewhere, if any.
        """
        tokens = len(attempt.sample.tokens)
        attempt.trace.end(verdict=effect.value, cause=cause, tokens=tokens)
        running = self.batches.of(attempt)
        if running is not None:
            self._settle(running, attempt.index, effect, cause)
            self.save(running)

    def save(self, running: RunningBatch) -> None:
        """Write new tokens and endings to the journal; for a private batch, wake its reader instead."""
        if running.private:
            running.changed.notify()
        elif running.batch.endings or running.batch.unjournaled:
            self.writer.touch(running.batch)

    def _settle(self, running: RunningBatch, index: int, effect: EventEffect, cause: str = "") -> None:
        """Apply the effect of an event: requeue the sample, or account for its end."""
        if effect is EventEffect.IGNORED:
            return
        running.places.pop(index, None)
        running.calls.discard(index)
        self.batches.progress.set()
        if effect is EventEffect.WAITING:
            self.placer.enqueue(running, index)
            if cause:
                self.metrics.resubmissions.labels(cause).inc()
            return
        if effect is EventEffect.CALLING:
            running.left.end(index)
            self.metrics.calls.inc()
            return
        batch = running.batch
        self.batches.count(batch.account, -1, -batch.group_of(index).most_tokens)
        running.left.end(index)
        self._account(running, index)

    def _account(self, running: RunningBatch, index: int) -> None:
        """Account for a sample that has just ended, with its tokens still in place."""
        batch, sample = running.batch, running.batch.samples[index]
        ending = batch.endings[-1]
        self.metrics.samples.labels(sample_pb2.SampleStatus.Name(ending.status)[14:].lower()).inc()
        self.metrics.sample_tokens.observe(len(sample.tokens))
        if ending.status == sample_pb2.SAMPLE_STATUS_FAILED:
            log.warning("sample_failed", batch=batch.key, sample=index, error=ending.error)
        if ending.is_whole:
            self._keep(batch, ending)
            group = batch.group_of(index)
            if self.estimator.observe(batch, index) and group.count <= _MOST_SIBLINGS:
                # Waiting samples of the group have a better prediction now.
                for sibling in range(group.first, group.first + group.count):
                    if (running, sibling) in self.placer.queue:
                        self.placer.enqueue(running, sibling)
        self._end_feeding(batch)
        if running.in_step:
            self._end_in_step(running, ending)

    def _keep(self, batch: RolloutBatch, ending: SampleEnding) -> None:
        """Count a completed or truncated sample, and pass it on to the draft store and the learner."""
        sample = batch.samples[ending.index]
        level = sample_pb2.ExactnessLevel.Name(batch.exactness.level)[16:].lower()
        self.metrics.count_whole(level, len(sample.tokens), *sample.reuse)
        if batch.rewarded_as and batch.cached_run:
            self.singles.add(batch, ending.index)
        if self.history is not None:
            self.history.offer(batch, ending)
        if self.feed is not None:
            self.feed.offer(batch, ending)

    def _end_feeding(self, batch: RolloutBatch) -> None:
        """Report the end of a batch to the learner, if it is over. The step of single samples has no end."""
        if self.feed is not None and batch.is_done() and not batch.open and not batch.rewarded_as:
            self.feed.end(batch)

    def _begin_in_step(
        self, batch: RolloutBatch, samples: int, now: float, pregenerated: int | None = None
    ) -> None:
        version = batch.current_version
        for report in self._steps.begin(batch.key[0], batch.step, samples, now, pregenerated, version):
            self._report(report)

    def _end_in_step(self, running: RunningBatch, ending: SampleEnding) -> None:
        """Record the end of a sample in its step, and report the step with its last sample."""
        batch = running.batch
        sample = batch.samples[ending.index]
        prompt, tokens = batch.group_of(ending.index).prompt_id, len(sample.tokens)
        ended = TimedSample(sample, prompt, tokens, batch.accepted_at, ending.at)
        draft = self.estimator.covered(batch, ending.index)
        existed = sample.reuse[0] if running.private else 0 if draft is None else draft.tokens
        # A draft may be longer than the response.
        report = self._steps.end(batch.key[0], batch.step, ended, min(existed, tokens), self.placer.serving)
        if report is not None:
            report.version = batch.current_version
            self._report(report)

    def _report(self, report: StepReport) -> None:
        """Report a step that is over."""
        bubbles = report.bubbles(report.serving)
        seconds = report.ended_at - report.begun_at
        self.metrics.step_over(
            seconds, report.parts(), list(bubbles.values()), report.tokens, report.pregenerated
        )
        self.record(step_record(report, bubbles, report.version))
        log.info("step_over", run=report.run_id, step=report.step, bubbles=bubbles)
