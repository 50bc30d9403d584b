"""Settlement of samples after an event: back to the queue, or ended, accounted for, and into the journal."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from paceline.v1 import sample_pb2
from services.gateway.batches.rollout_batch import RolloutBatch
from services.gateway.batches.sample import EventEffect, SampleEnding
from services.gateway.dispatch.critical_path import TimedSample
from services.gateway.dispatch.estimator import Coverage, WorkEstimator
from services.gateway.dispatch.placer import Placer
from services.gateway.dispatch.running_batch import ActiveBatches, RunningBatch
from services.gateway.dispatch.step_report import IdleTimeBook, step_record
from services.gateway.dispatch.work_link import Attempt
from services.gateway.finished.ended_singles import EndedSingles
from services.gateway.finished.history_writer import HistoryWriter
from services.gateway.finished.learner_feed import LearnerFeed
from services.gateway.journal.journal_writer import JournalWriter
from services.gateway.metrics import GatewayMetrics
from services.platform.redis.decision_log import DecisionRecord

log = structlog.get_logger(__name__)

# Larger groups keep the place that they have in the queue: a better one is not worth the walk at each end.
_MOST_SIBLINGS = 256


@dataclass(eq=False)
class Settlement:
    """Route from the effect of an event to the queue, the journal and the accounts of steps.

    Completed and truncated samples go to `history` (the draft store) and `feed` (the learner), where there
    are such. `record` writes to the decision log.
    """

    batches: ActiveBatches
    estimator: WorkEstimator
    placer: Placer
    writer: JournalWriter
    metrics: GatewayMetrics
    history: HistoryWriter | None
    feed: LearnerFeed | None
    singles: EndedSingles
    record: Callable[[DecisionRecord], None]
    _steps: IdleTimeBook = field(init=False, default_factory=IdleTimeBook)

    def begin(self, batch: RolloutBatch, coverage: Coverage | None) -> None:
        """Begin a batch, of whose samples these drafts exist (None: its step was not hinted)."""
        if coverage is not None:
            self.estimator.cover(batch, coverage)
        pregenerated = None if coverage is None else 0
        self._steps.begin(batch.key[0], batch.step, batch.unfinished, batch.accepted_at, pregenerated)
        self.metrics.show_run(batch.key[0], time.time(), step=batch.step)

    def extend(self, batch: RolloutBatch, samples: int) -> None:
        """Begin so many samples that are added to a batch."""
        pregenerated = 0 if self.estimator.knows(batch) else None
        self._steps.begin(batch.key[0], batch.step, samples, time.time(), pregenerated)

    def reopen(self, running: RunningBatch, index: int) -> None:
        """Let a sample that has ended wait again, without its tokens."""
        batch = running.batch
        batch.reopen(index)
        self.batches.count(batch.account, 1, batch.group_of(index).most_tokens)
        self._steps.begin(batch.key[0], batch.step, 1, time.time())

    def end_feeding(self, batch: RolloutBatch) -> None:
        """Tell the learner that a batch is over, if it is. Single samples are those of a step that has no end."""
        if self.feed is not None and batch.is_done() and not batch.open and not batch.rewarded_as:
            self.feed.end(batch)

    def drop(self, batch: RolloutBatch) -> None:
        """Give up what remains of a batch."""
        self._steps.drop(batch.key[0], batch.step, batch.unfinished)

    def take_back(self, attempt: Attempt, effect: EventEffect, cause: str = "") -> None:
        """Settle a sample that has left its instance; `cause` is why it has to be resumed elsewhere, if so."""
        tokens = len(attempt.sample.tokens)
        attempt.trace.end(verdict=effect.value, cause=cause, tokens=tokens)
        running = self.batches.of(attempt)
        if running is not None:
            self.settle(running, attempt.index, effect, cause)
            self.save(running)

    def settle(self, running: RunningBatch, index: int, effect: EventEffect, cause: str = "") -> None:
        """Let a sample wait again, or account for its end."""
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

    def save(self, running: RunningBatch) -> None:
        """Have new tokens and endings written to the journal; wake the readers of a private batch."""
        if running.private:
            running.changed.notify()
        elif running.batch.endings or running.batch.unjournaled:
            self.writer.touch(running.batch)

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
            siblings = batch.group_indexes(index)
            if self.estimator.observe(batch, index) and len(siblings) <= _MOST_SIBLINGS:
                # Those that still wait have a better prediction now.
                for sibling in siblings:
                    if self.placer.is_waiting(running, sibling):
                        self.placer.enqueue(running, sibling)
        self.end_feeding(batch)
        if not running.private:
            self._end_in_step(batch, ending)

    def _keep(self, batch: RolloutBatch, ending: SampleEnding) -> None:
        sample = batch.samples[ending.index]
        level = sample_pb2.ExactnessLevel.Name(batch.exactness.level)[16:].lower()
        self.metrics.count_whole(level, len(sample.tokens), *sample.reuse)
        if batch.rewarded_as and batch.cached_run:
            self.singles.add(batch, ending.index)
        if self.history is not None:
            self.history.offer(batch, ending)
        if self.feed is not None:
            self.feed.offer(batch, ending)

    def _end_in_step(self, batch: RolloutBatch, ending: SampleEnding) -> None:
        sample = batch.samples[ending.index]
        prompt, tokens = batch.group_of(ending.index).prompt_id, len(sample.tokens)
        ended = TimedSample(sample, prompt, tokens, batch.accepted_at, ending.at)
        draft = self.estimator.covered(batch, ending.index)
        # A draft may be longer than what is sampled in the end.
        ahead = min(draft.tokens, tokens) if draft is not None else 0
        report = self._steps.end(batch.key[0], batch.step, sample.spans, tokens, ending.at, ended, ahead)
        if report is not None:
            bubbles = report.bubbles(self.placer.links)
            seconds = report.ended_at - report.begun_at
            self.metrics.step_over(seconds, list(bubbles.values()), report.tokens, report.pregenerated)
            self.record(step_record(report, bubbles, batch.current_version))
            log.info("step_over", run=report.run_id, step=report.step, bubbles=bubbles)
