"""Handle events of instances: the beginning and end of work streams, and the messages on them.

An instance may move a sample to another, which claims it by KV or resumes it by its prefix. If the gateway is still
connecting to the receiver, the sample waits here for the link, for a limited time; then any instance resumes it by
its prefix, as after a loss.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import structlog
from google.rpc import code_pb2

from paceline.columns import mismatch
from paceline.internal.v1 import generation_pb2
from paceline.internal.v1 import generation_pb2 as pb
from paceline.v1 import sample_pb2
from services.contracts.errors import RESUMING
from services.contracts.gateway_keys import BatchKey
from services.gateway.metrics import GatewayMetrics
from services.gateway.scheduler.active_batches import ActiveBatches, RunningBatch
from services.gateway.scheduler.estimator import WorkEstimator
from services.gateway.scheduler.placer import Placer
from services.gateway.scheduler.scheduler import Scheduler
from services.gateway.scheduler.turns import Steps, Turns
from services.gateway.scheduler.work_link import Attempt, WorkLink
from services.gateway.state.fleet_health import FleetHealth
from services.gateway.state.sample import SamplePhase

log = structlog.get_logger(__name__)

# Codes of refusals that every instance would repeat: the request is wrong, or the weights are broken.
_FINAL = (code_pb2.INVALID_ARGUMENT, code_pb2.DATA_LOSS)


class MovesInTransit:
    """Attempts that wait for the link to their receiver, by the receiver's id. Pure."""

    def __init__(self) -> None:
        self._waiting: dict[str, dict[Attempt, None]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def wait(self, attempt: Attempt, receiver: str) -> None:
        """Let an attempt wait until `arrivals` or `leave`."""
        self._waiting.setdefault(receiver, {})[attempt] = None

    def arrivals(self, receiver: str) -> list[Attempt]:
        """Remove and return all attempts that wait for an instance, in order."""
        return list(self._waiting.pop(receiver, ()))

    def leave(self, attempt: Attempt, receiver: str) -> bool:
        """Remove one attempt; return False if it did not wait."""
        waiting = self._waiting.get(receiver, {})
        if attempt not in waiting:
            return False
        del waiting[attempt]
        if not waiting:
            del self._waiting[receiver]
        return True


@dataclass(eq=False)
class InstanceEvents:
    """Handler of everything that happens on work streams.

    `wait_seconds`: longest wait of a sample for the link to the instance that it was moved to.
    """

    batches: ActiveBatches
    estimator: WorkEstimator
    placer: Placer
    scheduler: Scheduler
    turns: Turns
    fleet: FleetHealth
    metrics: GatewayMetrics
    wait_seconds: float
    transit: MovesInTransit = field(init=False, default_factory=MovesInTransit)
    _loop: asyncio.AbstractEventLoop = field(init=False, default_factory=asyncio.get_running_loop)

    def link_up(self, link: WorkLink) -> None:
        """Begin to give samples to an instance."""
        self.placer.add(link)
        self._admit_moved(link)
        self.placer.pump_soon()

    def link_lost(self, link: WorkLink, reason: str) -> None:
        """Resume the samples of an instance elsewhere."""
        self.placer.remove(link)
        held = link.lose()
        if held:
            log.warning("resubmitting", instance=link.instance_id, samples=len(held), reason=reason)
        self.turns.run(self._resume_elsewhere(held))

    def _resume_elsewhere(self, held: list[Attempt]) -> Steps:
        for attempt in held:
            self.scheduler.take_back(attempt, attempt.lost(time.time()), "lost")
            yield
        self.placer.pump_soon()

    def responded(self, link: WorkLink, response: pb.WorkResponse) -> None:
        """Process one message of an instance. ValueError if its tokens and log-probabilities do not match."""
        self.fleet.note_message(link.instance_id, link.epoch, self._loop.time())
        now = time.time()
        extended = self._extend(link, response, now)
        for finished in response.finished:
            attempt = link.release(finished.handle)
            if attempt is not None:
                effect = attempt.batch.finish(attempt.index, attempt.number, finished, now)
                self.scheduler.take_back(attempt, effect, "moved" if finished.resume_on else "handed_over")
                if finished.resume_on:
                    self._moved_by_prefix(attempt, finished.resume_on)
        for refused in response.refused:
            self._refused(link, refused, now)
        for moved in response.moved:
            self._moved_by_kv(link, moved, now)
        for running in extended:
            self.scheduler.save(running)
        if response.finished or response.refused or response.moved:
            self.placer.pump_soon()
        if not response.refused and (response.deltas or response.finished):
            link.refusals.succeeded()

    def _extend(self, link: WorkLink, response: pb.WorkResponse, now: float) -> list[RunningBatch]:
        """Append new tokens to their samples; return the batches that have grown."""
        tokens, extended = 0, dict[BatchKey, RunningBatch]()
        for delta in response.deltas:
            attempt = link.held.get(delta.handle)
            if attempt is None:
                continue
            count, verified = len(delta.tokens.token_ids), delta.verified_logprobs
            if wrong := mismatch(delta.tokens, attempt.batch.group_of(attempt.index).sampling):
                raise ValueError(wrong)
            if len(verified) > count:
                raise ValueError(f"{count} tokens with {len(verified)} verified logprobs")
            if delta.HasField("prompt_logprobs"):
                attempt.batch.set_prompt_logprobs(attempt.index, attempt.number, delta.prompt_logprobs)
            if attempt.batch.extend(attempt.index, attempt.number, delta.tokens, now, verified):
                tokens += count
                running = self.batches.by_key.get(attempt.batch.key)
                if running is not None:
                    running.left.run(attempt.index, count)
                    extended[attempt.batch.key] = running
        if tokens:
            self.metrics.tokens.labels(link.instance_id).inc(tokens)
        return list(extended.values())

    def _refused(self, link: WorkLink, refused: pb.Refused, now: float) -> None:
        attempt = link.release(refused.handle)
        if attempt is None:
            return
        self.metrics.refused(link.instance_id, refused.code)
        failure = sample_pb2.SampleFailure(code=refused.code, field=refused.field, reason=refused.message)
        if refused.code in _FINAL:
            self.scheduler.take_back(attempt, attempt.batch.fail(attempt.index, failure, now))
        elif refused.reason == RESUMING:
            # Tokens that were streamed to a caller cannot be revoked.
            running = self.batches.of(attempt)
            renews = running is not None and not running.private
            effect = attempt.batch.resume_refused(attempt.index, attempt.number, failure, now, renews=renews)
            self.scheduler.take_back(attempt, effect)
        elif attempt.migration_id:
            self._claim_refused(attempt, now)
        else:
            if not self.placer.is_paused(link):
                self.placer.pause(link)
                log.info(
                    "instance_refused", instance=link.instance_id, code=refused.code, message=refused.message
                )
            effect = attempt.batch.refused(attempt.index, attempt.number, now, refused.message)
            self.scheduler.take_back(attempt, effect)

    # Moves ----------------------------------------------------------------------------------------------

    def _moved_by_kv(self, link: WorkLink, moved: generation_pb2.Moved, now: float) -> None:
        """Follow a sample that was moved with its KV and already runs on the receiver."""
        left = link.release(moved.handle)
        if left is None:
            return
        batch, index, receiver = left.batch, left.index, moved.instance_id
        number = batch.moved(index, left.number, receiver, moved.response_tokens, now)
        if number is None and left.is_running:
            self.metrics.moves.labels("tokens_missing").inc()
            log.error("moved_sample_incomplete", batch=batch.key, sample=index, instance=link.instance_id)
            self.scheduler.take_back(left, left.lost(now), "tokens_missing")
        left.trace.end(verdict="moved", to=receiver, tokens=moved.response_tokens)
        attempt = Attempt(
            batch, index, number or left.number, left.prompt, left.predicted, migration_id=moved.migration_id
        )
        running = self.batches.of(attempt)
        if running is not None and attempt.is_running:
            running.places.pop(index, None)
            attempt.trace = running.begin_span(index)
            attempt.predicted = self.estimator.remaining(batch, index)
        if receiver in self.placer.links:
            self._claim(self.placer.links[receiver], attempt)
        else:
            self._await_link(attempt, receiver)

    def _moved_by_prefix(self, attempt: Attempt, receiver: str) -> None:
        """Resume a sample by its prefix on the receiver.

        If there is no link to the receiver yet, the sample waits for it. In the queue it could return to its former
        instance, which has room for it now.
        """
        if receiver in self.placer.links:
            self._resume(attempt, receiver)
            return
        running = self.batches.of(attempt)
        if running is not None and self.placer.queue.discard((running, attempt.index)):
            self._await_link(attempt, receiver)

    def _admit_moved(self, link: WorkLink) -> None:
        """Claim the samples that were moved to the instance by KV, and resume those moved by prefix."""
        for attempt in self.transit.arrivals(link.instance_id):
            if attempt.migration_id:
                self._claim(link, attempt)
            elif self._requeue(attempt):
                self._resume(attempt, link.instance_id)

    def _claim_refused(self, attempt: Attempt, now: float) -> None:
        """Resume a sample elsewhere, since the receiver no longer has it; the receiver may still take others."""
        self.metrics.moves.labels("refused").inc()
        self.scheduler.take_back(attempt, attempt.lost(now), "claim_refused")

    def _await_link(self, attempt: Attempt, receiver: str) -> None:
        self.transit.wait(attempt, receiver)
        self._loop.call_later(self.wait_seconds, self._give_up, attempt, receiver)

    def _resume(self, attempt: Attempt, receiver: str) -> None:
        running = self.batches.of(attempt)
        placed = running is not None and self.placer.place_on(running, attempt.index, receiver)
        self.metrics.moves.labels("by_prefix" if placed else "no_place").inc()

    def _claim(self, link: WorkLink, attempt: Attempt) -> None:
        handle = next(link.handles)
        link.claim(attempt, handle)
        running = self.batches.of(attempt)
        if running is not None and attempt.is_running:
            running.places[attempt.index] = (link, handle)
        if running is None or not attempt.is_running or attempt.sample.cancelled:
            # Claimed nevertheless, so that the receiver ends it at once.
            link.abort(handle)
            self.metrics.moves.labels("unwanted").inc()
            return
        self.metrics.moves.labels("claimed").inc()
        log.debug("claimed", batch=attempt.batch.key, sample=attempt.index, instance=link.instance_id)

    def _give_up(self, attempt: Attempt, receiver: str) -> None:
        if not self.transit.leave(attempt, receiver):
            return
        if not attempt.migration_id:
            self.metrics.moves.labels("no_link").inc()
            self._requeue(attempt)
        elif attempt.is_running:
            self.metrics.moves.labels("no_link").inc()
            self.scheduler.take_back(attempt, attempt.lost(time.time()), "no_link")
            self.placer.pump_soon()

    def _requeue(self, attempt: Attempt) -> bool:
        """Let a sample wait for any instance again; return False if it has ended or was placed since."""
        sample, running = attempt.sample, self.batches.of(attempt)
        if sample.phase is not SamplePhase.WAITING or sample.attempt != attempt.number:
            return False
        if running is not None:
            self.placer.enqueue(running, attempt.index)
            self.placer.pump_soon()
        return True
