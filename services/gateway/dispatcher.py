"""Gives samples to instances and takes in what they send: the centre of the gateway.

All of this runs on one event loop and, apart from deadlines, only in answer to something:
a batch, a message of an instance, a lost instance. What is decided is decided in the pure modules.
"""

import asyncio
import time
from collections.abc import Hashable, Iterable

import structlog

from paceline.internal.v1 import generation_pb2
from paceline.v1 import sample_pb2
from services.gateway.assemble import work_item
from services.gateway.batch import Batch, BatchKey, Ending, Phase, Verdict
from services.gateway.config import GatewayConfig
from services.gateway.feed import LearnerFeed
from services.gateway.fleet import Fleet, State
from services.gateway.hints import Coverage, remaining_work
from services.gateway.history import History
from services.gateway.lengths import LengthPredictor
from services.gateway.links import Held, WorkLink
from services.gateway.metrics import GatewayMetrics
from services.gateway.moves import Moves
from services.gateway.placement import Assignment, Waiting, WaitingQueue
from services.gateway.running import Ref, Running
from services.gateway.steps import StepBook
from services.gateway.writer import JournalWriter
from services.platform import tracing
from services.platform.pulse import Pulse

log = structlog.get_logger(__name__)

_INVALID_ARGUMENT = 3
# Samples of one batch rank within this range after its order.
_ORDER_STEP = 1 << 32


class Dispatcher:
    """Batches, the queue and the links. `unfinished` counts the samples that have not ended."""

    def __init__(self, config: GatewayConfig, fleet: Fleet, metrics: GatewayMetrics) -> None:
        self.batches: dict[BatchKey, Running] = {}
        self.links: dict[str, WorkLink] = {}
        self.lengths = LengthPredictor()
        # Finished batches that are still listed as unfinished, and a beat for each.
        self.finished: list[BatchKey] = []
        self.changed = Pulse()
        # Set whenever a sample was placed, waits again or has ended; cleared by whoever follows that.
        self.moved = asyncio.Event()
        self.unfinished = 0
        self._config = config
        self._fleet = fleet
        self._metrics = metrics
        self._queue: WaitingQueue[Ref] = WaitingQueue()
        self._orders = 0
        self._pump_due = False
        self._loop = asyncio.get_running_loop()
        self._writer: JournalWriter | None = None
        self._history: History | None = None
        self._feed: LearnerFeed | None = None
        self._steps = StepBook()
        self._moves = Moves(self, metrics, config.claim_wait_seconds)
        # What was there of the samples of a batch before it began.
        self._coverage: dict[BatchKey, Coverage] = {}

    def journal_with(self, writer: JournalWriter) -> None:
        """Sets who carries tokens and finished samples into the journal."""
        self._writer = writer

    def remember_with(self, history: History) -> None:
        """Sets who carries finished samples into the draft store."""
        self._history = history

    def teach_with(self, feed: LearnerFeed) -> None:
        """Sets who carries finished samples to the learner of the drafter."""
        self._feed = feed

    # Batches -------------------------------------------------------------------------------------------

    def add(
        self,
        batch: Batch,
        *,
        fingerprint: str = "",
        private: bool = False,
        events: int = 0,
        coverage: Coverage | None = None,
    ) -> Running:
        """Starts to work on a batch (or goes on with it); `events` of it are in the journal already, and
        `coverage` is there of its samples (None: its step was not announced)."""
        self._orders += _ORDER_STEP
        running = Running(batch, self._orders, fingerprint, private, events)
        running.trace = tracing.begin(
            "batch", root=True, run_id=batch.key[0], step=batch.step, samples=len(batch.remaining())
        )
        self.batches[batch.key] = running
        if not private:
            self._begin_step(batch, coverage)
            self._metrics.runs.show(batch.key[0], time.time(), step=batch.step)
        self._gauge_batches()
        for sample in batch.remaining():
            self.unfinished += 1
            if sample.cancelled:
                self._settle(running, sample.index, batch.abort(sample.index, time.time()), "")
            else:
                self._enqueue(running, sample.index)
        left = max(0.0, batch.deadline_at - time.time())
        running.timers.append(self._loop.call_later(left, self._expire, running))
        self._saved_later(running)
        self.pump_soon()
        return running

    def cancel(self, running: Running, indexes: Iterable[int], keep_partial: bool) -> int:
        """Ends samples as ABORTED, now or when their instance has answered; returns how many."""
        cancelled = 0
        for index in indexes:
            phase = running.batch.cancel(index, keep_partial)
            cancelled += phase is not Phase.ENDED
            if phase is Phase.WAITING:
                self._queue.discard((running.batch.key, index))
                self._settle(running, index, running.batch.abort(index, time.time()), "")
            elif phase is Phase.ASSIGNED and index not in running.places:
                # On its way to another instance, where it will be claimed to be aborted.
                self._settle(running, index, running.batch.abort(index, time.time()), "")
            elif phase is Phase.ASSIGNED:
                link, handle = running.places[index]
                link.abort(handle)
                wait = self._config.abort_timeout_seconds
                running.timers.append(self._loop.call_later(wait, self._give_up, running, index))
        self._saved_later(running)
        return cancelled

    def drop(self, running: Running) -> None:
        """Forgets a batch; what of it is still on instances is aborted there."""
        if self.batches.get(running.batch.key) is not running:
            return
        running.stop_timers()
        running.dropped = True
        running.trace.end(running.broken, delivered=running.events)
        del self.batches[running.batch.key]
        self._coverage.pop(running.batch.key, None)
        if not running.private:
            self._steps.drop(running.batch.key[0], running.batch.step, len(running.batch.remaining()))
        for sample in running.batch.remaining():
            self.unfinished -= 1
            self._queue.discard((running.batch.key, sample.index))
        for link, handle in running.places.values():
            link.abort(handle)
        running.places.clear()
        self._gauge_batches()
        self._gauge_queue()
        self.moved.set()
        running.changed.beat()

    def written(self, key: BatchKey, events: int) -> None:
        """The journal now has this many finished samples of the batch: they may be delivered."""
        running = self.batches.get(key)
        if running is None:
            return
        running.events = max(running.events, events)
        if running.events >= len(running.batch.samples):
            self._metrics.batch_seconds.observe(time.time() - running.batch.accepted_at)
            log.info("batch_finished", batch=key, samples=running.events)
            self.drop(running)
            self.finished.append(key)
            self.changed.beat()
        running.changed.beat()

    def gone(self, key: BatchKey, reason: str) -> None:
        """Redis has lost the batch: nothing more of it can be delivered exactly once."""
        running = self.batches.get(key)
        if running is not None:
            log.error("batch_lost_by_journal", batch=key, reason=reason)
            running.broken = reason
            self.drop(running)

    # Links ---------------------------------------------------------------------------------------------

    def link_up(self, link: WorkLink) -> None:
        """The instance can be given work."""
        self.links[link.instance_id] = link
        self._moves.arrived(link)
        self.pump_soon()

    def link_lost(self, link: WorkLink, reason: str) -> None:
        """The instance can be given no work any more; its samples go on elsewhere."""
        if self.links.get(link.instance_id) is link:
            del self.links[link.instance_id]
            self._metrics.running.labels(link.instance_id).set(0)
        held, link.held = link.held, {}
        if held:
            log.warning("resubmitting", instance=link.instance_id, samples=len(held), reason=reason)
        now = time.time()
        for each in held.values():
            self.take_back(each, each.batch.lost(each.index, each.attempt, now), "lost")
        self.pump_soon()

    def responded(self, link: WorkLink, response: generation_pb2.WorkResponse) -> None:
        """Takes in one message of an instance."""
        self._fleet.heard(link.instance_id, link.epoch, self._loop.time())
        now = time.time()
        touched: dict[BatchKey, Running] = {}
        self._extend(link, response, now, touched)
        for finished in response.finished:
            held = link.release(finished.handle)
            if held is not None:
                verdict = held.batch.finish(held.index, held.attempt, finished, now)
                self.take_back(held, verdict, "moved" if finished.resume_on else "handed_over")
                if finished.resume_on:
                    self._moves.handed_on(held, finished.resume_on)
        for refused in response.refused:
            self._refused(link, refused, now)
        for moved in response.moved:
            self._moves.moved(link, moved, now)
        for running in touched.values():
            self._saved_later(running)
        if response.finished or response.refused or response.moved:
            self._metrics.running.labels(link.instance_id).set(len(link.held))
            self.pump_soon()
        if not response.refused and (response.deltas or response.finished):
            link.refusals = 0

    def _extend(
        self,
        link: WorkLink,
        response: generation_pb2.WorkResponse,
        now: float,
        touched: dict[BatchKey, Running],
    ) -> None:
        tokens = 0
        for delta in response.deltas:
            held = link.held.get(delta.handle)
            if held is None:
                continue
            if len(delta.token_ids) != len(delta.logprobs):
                raise ValueError(f"{len(delta.token_ids)} tokens with {len(delta.logprobs)} logprobs")
            verified = delta.verified_logprobs
            if len(verified) > len(delta.token_ids):
                raise ValueError(f"{len(delta.token_ids)} tokens with {len(verified)} verified logprobs")
            if held.batch.extend(held.index, held.attempt, delta.token_ids, delta.logprobs, now, verified):
                tokens += len(delta.token_ids)
                running = self.batches.get(held.batch.key)
                if running is not None:
                    touched[held.batch.key] = running
        if tokens:
            self._metrics.tokens.labels(link.instance_id).inc(tokens)

    def _refused(self, link: WorkLink, refused: generation_pb2.Refused, now: float) -> None:
        held = link.release(refused.handle)
        if held is None:
            return
        self._metrics.refused(link.instance_id, refused.code)
        if refused.code == _INVALID_ARGUMENT:
            error = f"{link.instance_id} refused {refused.field or 'the sample'}: {refused.message}"
            self.take_back(held, held.batch.fail(held.index, error, now), "")
            return
        if held.migration_id:
            self._moves.refused(held, now)
            return
        pause = self._config.refusal_pause_seconds * 2 ** min(link.refusals, 16)
        pause = min(pause, self._config.refusal_pause_most_seconds)
        if link.closed_until <= self._loop.time():
            link.refusals += 1
            link.closed_until = self._loop.time() + pause
            self._loop.call_later(pause, self.pump_soon)
            log.info(
                "instance_refused", instance=link.instance_id, code=refused.code, message=refused.message
            )
        self.take_back(held, held.batch.refused(held.index, held.attempt, now), "")

    def running(self, held: Held) -> Running | None:
        """The batch of a sample, if it is still being worked on."""
        running = self.batches.get(held.batch.key)
        return running if running is not None and running.batch is held.batch else None

    # Placement -----------------------------------------------------------------------------------------

    def pump_soon(self) -> None:
        """Places waiting samples once the current event has been dealt with."""
        if not self._pump_due:
            self._pump_due = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._pump_due = False
        if len(self._queue):
            now = self._loop.time()
            free = [link.slots for link in self.links.values() if self._is_open(link, now)]
            for assignment in self._queue.place(free, self._config.affinity_slack):
                self._give(assignment)
        self._gauge_queue()
        self.moved.set()

    def _is_open(self, link: WorkLink, now: float) -> bool:
        member = self._fleet.member(link.instance_id, link.epoch)
        return member is not None and member.state is State.SERVING and link.closed_until <= now

    def _give(self, assignment: Assignment[Ref]) -> None:
        key, index = assignment.waiting.ref
        running, link = self.batches[key], self.links[assignment.instance_id]
        now = time.time()
        attempt = running.batch.assign(index, link.instance_id, now)
        handle = link.next_handle()
        sample, waiting = running.batch.samples[index], assignment.waiting
        span = self.trace(running, index)
        item = work_item(running.batch, sample, handle)
        item.trace_parent = span.traceparent
        link.give(Held(running.batch, index, attempt, waiting.prompt, waiting.predicted, span), item)
        running.places[index] = (link, handle)
        self._metrics.placements.labels(link.instance_id).inc()
        self._metrics.running.labels(link.instance_id).set(len(link.held))
        if attempt == 1:
            self._metrics.queue_seconds.observe(now - running.batch.accepted_at)
        log.debug("placed", batch=key, sample=index, instance=link.instance_id, attempt=attempt)

    def place_on(self, held: Held, instance_id: str) -> bool:
        """Gives a sample that waits to this instance; False when that cannot take it, and it waits for any."""
        link, key = self.links.get(instance_id), (held.batch.key, held.index)
        if link is None or key not in self._queue or not self._is_open(link, self._loop.time()):
            return False
        if link.slots.room < 1 or link.slots.policy_version != held.batch.policy_version:
            return False
        waiting = self._queue.take(key)
        if waiting is None:
            return False
        link.slots.take(waiting.prompt, waiting.predicted)
        self._give(Assignment(waiting, instance_id))
        return True

    def set_aside(self, held: Held) -> bool:
        """Takes a sample that waits out of the queue, for a while; False when it does not wait."""
        return self._queue.discard((held.batch.key, held.index))

    def put_back(self, held: Held) -> None:
        """Lets a sample that was set aside wait again."""
        running = self.running(held)
        if running is not None:
            self._enqueue(running, held.index)
            self.pump_soon()

    def work_left(self, running: Running, index: int) -> float:
        """Tokens that a sample is predicted to need still; drafted ones count for less."""
        batch, sample = running.batch, running.batch.samples[index]
        group = batch.groups[sample.group]
        limit = group.sampling.max_tokens if group.sampling.HasField("max_tokens") else None
        run_id = batch.key[0]
        predicted = self.lengths.predict(run_id, group.prompt_id, group.expected_tokens, limit)
        covered = self._coverage.get(batch.key, {}).get((group.prompt_id, sample.slot))
        return remaining_work(predicted, len(sample.tokens), covered, self._config.draft_cost)

    def _enqueue(self, running: Running, index: int) -> None:
        batch = running.batch
        prompt: Hashable = (batch.key[0], batch.groups[batch.samples[index].group].prompt_id)
        self._queue.push(
            Waiting(
                ref=(batch.key, index),
                prompt=prompt,
                policy_version=batch.policy_version,
                predicted=self.work_left(running, index),
                order=running.order + index,
            )
        )

    # What became of a sample ---------------------------------------------------------------------------

    def trace(self, running: Running, index: int) -> tracing.Span:
        """The span of a sample's attempt, from its placement until it is taken back."""
        sample = running.batch.samples[index]
        return tracing.begin(
            "sample",
            running.trace.traceparent,
            prompt_id=running.batch.groups[sample.group].prompt_id,
            slot=sample.slot,
            attempt=sample.attempt,
            instance_id=sample.instance_id,
            prefix_tokens=len(sample.tokens),
        )

    def take_back(self, held: Held, verdict: Verdict, cause: str) -> None:
        """Takes in what became of a sample that no instance has any more."""
        tokens = len(held.batch.samples[held.index].tokens)
        held.trace.end(verdict=verdict.value, cause=cause, tokens=tokens)
        running = self.running(held)
        if running is not None:
            self._settle(running, held.index, verdict, cause)
            self._saved_later(running)

    def _settle(self, running: Running, index: int, verdict: Verdict, cause: str) -> None:
        if verdict is Verdict.IGNORED:
            return
        running.places.pop(index, None)
        self.moved.set()
        if verdict is Verdict.WAITING:
            self._enqueue(running, index)
            if cause:
                self._metrics.resubmissions.labels(cause).inc()
            return
        self._ended(running, index)

    def _ended(self, running: Running, index: int) -> None:
        self.unfinished -= 1
        batch, sample = running.batch, running.batch.samples[index]
        ending = batch.endings[-1]
        self._metrics.samples.labels(sample_pb2.SampleStatus.Name(ending.status)[14:].lower()).inc()
        self._metrics.sample_tokens.observe(len(sample.tokens))
        if ending.status == sample_pb2.SAMPLE_STATUS_FAILED:
            log.warning("sample_failed", batch=batch.key, sample=index, error=ending.error)
        if ending.status in (sample_pb2.SAMPLE_STATUS_COMPLETED, sample_pb2.SAMPLE_STATUS_TRUNCATED):
            self.lengths.observe(batch.key[0], batch.groups[sample.group].prompt_id, len(sample.tokens))
            if not running.private:
                self._keep(batch, ending)
            # Its siblings that still wait have a better prediction now.
            for sibling in running.members[sample.group]:
                if (batch.key, sibling) in self._queue:
                    self._enqueue(running, sibling)
        if not running.private:
            self._end_in_step(batch, ending)

    def _begin_step(self, batch: Batch, coverage: Coverage | None) -> None:
        pregenerated = None
        if coverage is not None:
            self._coverage[batch.key] = coverage
            keys = ((batch.groups[each.group].prompt_id, each.slot) for each in batch.samples)
            pregenerated = sum(coverage[key].tokens for key in keys if key in coverage)
        self._steps.begin(batch.key[0], batch.step, len(batch.remaining()), batch.accepted_at, pregenerated)

    def _end_in_step(self, batch: Batch, ending: Ending) -> None:
        sample = batch.samples[ending.index]
        report = self._steps.end(batch.key[0], batch.step, sample.spans, len(sample.tokens), ending.at)
        if report is not None:
            bubbles = report.bubbles(self.links)
            took = report.ended_at - report.begun_at
            self._metrics.step_over(took, list(bubbles.values()), report.tokens, report.pregenerated)
            log.info("step_over", run=report.run_id, step=report.step, bubbles=bubbles)

    def _keep(self, batch: Batch, ending: Ending) -> None:
        """Counts what a whole sample took over, and gives it to those that come after it."""
        state = batch.samples[ending.index]
        level = sample_pb2.ExactnessLevel.Name(batch.exactness.level)[16:].lower()
        self._metrics.count_whole(level, len(state.tokens), *state.reuse)
        if self._history is not None:
            self._history.offer(batch, ending)
        if self._feed is not None:
            self._feed.offer(batch, ending)

    def _saved_later(self, running: Running) -> None:
        if running.private or self._writer is None:
            running.changed.beat()
        elif running.batch.endings or running.batch.unjournaled:
            self._writer.touch(running.batch)

    def _expire(self, running: Running) -> None:
        remaining = [sample.index for sample in running.batch.remaining()]
        if remaining:
            log.warning("deadline_passed", batch=running.batch.key, samples=len(remaining))
            self._metrics.expired.inc(len(remaining))
            self.cancel(running, remaining, keep_partial=True)

    def _give_up(self, running: Running, index: int) -> None:
        verdict = running.batch.abort(index, time.time())
        if verdict is Verdict.ENDED:
            log.warning("abort_unanswered", batch=running.batch.key, sample=index)
            self._settle(running, index, verdict, "")
            self._saved_later(running)

    def _gauge_batches(self) -> None:
        submitted = [each.batch.accepted_at for each in self.batches.values() if not each.private]
        self._metrics.batches.set(len(self.batches))
        self._metrics.oldest_batch.set(min(submitted, default=0.0))

    def _gauge_queue(self) -> None:
        self._metrics.queued.set(len(self._queue))
