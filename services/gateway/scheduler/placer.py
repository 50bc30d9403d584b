"""Place waiting samples on the instances that have a work stream."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from services.gateway.journal.writer import JournalBacklog
from services.gateway.metrics import GatewayMetrics
from services.gateway.scheduler.active_batches import ActiveBatches, RunningBatch, SampleRef
from services.gateway.scheduler.estimator import WorkEstimator
from services.gateway.scheduler.placement import (
    InstancePool,
    InstanceSlots,
    Placement,
    WaitingQueue,
    WaitingSample,
)
from services.gateway.scheduler.turns import LONGEST_TURN
from services.gateway.scheduler.work_link import Attempt, WorkLink
from services.gateway.state.fleet_health import FleetHealth, MemberState
from services.gateway.state.messages import work_item


@dataclass(eq=False)
class Placer:
    """Queue of waiting samples, and the links to the instances that may take them.

    `affinity_slack`: see `InstancePool.choose`.
    """

    batches: ActiveBatches
    estimator: WorkEstimator
    fleet: FleetHealth
    metrics: GatewayMetrics
    backlog: JournalBacklog
    affinity_slack: float
    turn_seconds: float = LONGEST_TURN
    # True while weights are being applied on the instances: nothing is placed.
    held: bool = field(init=False, default=False)
    links: dict[str, WorkLink] = field(init=False, default_factory=dict)
    # Instances of the links. Every end of a sample notes them for its step's report, so they are not listed there.
    serving: tuple[str, ...] = field(init=False, default=())
    queue: WaitingQueue[SampleRef] = field(init=False, default_factory=WaitingQueue)
    _pool: InstancePool = field(init=False)
    # Revision of the fleet that the pool reflects.
    _revision: int = field(init=False, default=-1)
    _pump_due: bool = field(init=False, default=False)
    _loop: asyncio.AbstractEventLoop = field(init=False, default_factory=asyncio.get_running_loop)

    def __post_init__(self) -> None:
        self._pool = InstancePool(self._is_open)
        self.metrics.queued.set_function(lambda: len(self.queue))

    def add(self, link: WorkLink) -> None:
        """Place samples on an instance from now on."""
        self.links[link.instance_id] = link
        self.serving = tuple(self.links)
        self._pool.add(link.slots)
        self.metrics.running.labels(link.instance_id).set_function(lambda: len(link.held))

    def remove(self, link: WorkLink) -> None:
        """Place no more samples on an instance."""
        if self.links.get(link.instance_id) is link:
            del self.links[link.instance_id]
            self.serving = tuple(self.links)
            self._pool.remove(link.slots)

    def enqueue(self, running: RunningBatch, index: int) -> None:
        """Queue a sample, or move it to the position of its new prediction."""
        batch, run_id = running.batch, running.batch.key[0]
        sample, group = batch.samples[index], batch.group_of(index)
        predicted = self.estimator.remaining(batch, index)
        running.left.set(index, predicted, waiting=True)
        self.queue.push(
            WaitingSample(
                ref=(running, index),
                prompt=(run_id, group.prompt_id),
                policy_version=batch.current_version,
                predicted=predicted,
                order=running.order + index,
                run=run_id,
                priority=batch.priority,
                weight=batch.weight,
                # Set if the sample has called a tool.
                home=sample.instance_id,
                context=len(group.prompt_token_ids) + len(sample.tokens),
            )
        )

    @property
    def is_patient(self) -> bool:
        """True if nothing waits for the ends of single samples: no sample for a slot, and no environment."""
        return not len(self.queue) and not self.batches.with_tools

    def pump_soon(self) -> None:
        """Place waiting samples after the current event has been handled."""
        if not self._pump_due:
            self._pump_due = True
            self._loop.call_soon(self._pump)

    def place_on(self, running: RunningBatch, index: int, instance_id: str) -> bool:
        """Place a waiting sample on this instance.

        Returns False if the instance cannot take it; the sample then keeps waiting for any instance.
        """
        link, ref = self.links.get(instance_id), (running, index)
        if self._is_stopped or link is None or ref not in self.queue or not self._is_open(link.slots):
            return False
        if link.slots.room < 1 or link.slots.policy_version != running.batch.current_version:
            return False
        waiting = self.queue.take(ref)
        if waiting is None:
            return False
        link.slots.take(waiting.prompt, waiting.predicted)
        self._give(Placement(waiting, instance_id))
        return True

    def pause(self, link: WorkLink) -> None:
        """Place nothing on an instance that has just refused; each refusal in a row lengthens the pause."""
        pause = link.refusals.failed()
        link.closed_until = self._loop.time() + pause
        self._loop.call_later(pause, self._resume)

    def is_paused(self, link: WorkLink) -> bool:
        """Return True while nothing is placed on the instance because it refused."""
        return link.closed_until > self._loop.time()

    def _resume(self) -> None:
        self._pool.look_again()
        self.pump_soon()

    def _pump(self) -> None:
        """Place what fits; after `turn_seconds` yield to the event loop, and continue later."""
        self._pump_due = False
        if self._is_stopped:
            return
        if self._revision != self.fleet.revision:
            self._revision = self.fleet.revision
            self._pool.look_again()
        until = time.perf_counter() + self.turn_seconds
        while (placement := self.queue.place_next(self._pool, self.affinity_slack)) is not None:
            self._give(placement)
            if time.perf_counter() > until:
                self.pump_soon()
                break
        self.batches.progress.set()

    @property
    def _is_stopped(self) -> bool:
        return self.backlog.paused or self.held

    def _is_open(self, slots: InstanceSlots) -> bool:
        link = self.links[slots.instance_id]
        member = self.fleet.member(link.instance_id, link.epoch)
        return member is not None and member.state is MemberState.SERVING and not self.is_paused(link)

    def _give(self, placement: Placement[SampleRef]) -> None:
        waiting, link = placement.waiting, self.links[placement.instance_id]
        (running, index), now = waiting.ref, time.time()
        if running.dropped:
            # Its remaining samples are being removed from the queue.
            link.slots.give_back(waiting.prompt, waiting.predicted)
            return
        number = running.batch.assign(index, link.instance_id, now)
        handle, span = next(link.handles), running.begin_span(index)
        item = work_item(running.batch, running.batch.samples[index], handle, streamed=running.private)
        item.trace_parent = span.traceparent
        link.give(Attempt(running.batch, index, number, waiting.prompt, waiting.predicted, span), item)
        running.places[index] = (link, handle)
        running.left.run(index)
        self.metrics.placements.labels(link.instance_id).inc()
        if number == 1:
            self.metrics.queue_seconds.observe(now - running.batch.accepted_at)
