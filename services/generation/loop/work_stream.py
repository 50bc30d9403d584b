"""Stream of one caller of an instance: its samples, and when and what it is told of them."""

from __future__ import annotations

import asyncio
import random

from paceline.internal.v1 import generation_pb2 as pb
from paceline.v1 import fleet_pb2, sample_pb2
from services.generation.loop.checkpoints import CheckpointRules, Checkpoints
from services.generation.loop.outbox import OutboxEvent, ResponseOutbox
from services.generation.loop.samples import RunningSample


class WorkStream:
    """Stream of one caller: its samples, and the events that were not sent yet.

    A response goes out if a sample has ended or a streamed one has new tokens; otherwise, while samples run, now
    and then, with the load. It has the new tokens of all samples that are due to report. Filled by the engine
    thread, emptied by the event loop.
    """

    background = False

    def __init__(self, events: asyncio.AbstractEventLoop, rules: CheckpointRules | None = None) -> None:
        self.outbox = ResponseOutbox(events)
        self.samples: dict[int, RunningSample] = {}
        # Items that wait for their cached rollouts before they start, by handle.
        self.parked: dict[int, pb.WorkItem] = {}
        self._rules = rules or CheckpointRules()
        self._checkpoints = Checkpoints(self._rules, self.samples, random.random())
        self._pending = pb.WorkResponse()
        self._is_urgent = False
        self._sent_at = 0.0

    def add(self, sample: RunningSample, now: float) -> None:
        """Take in a sample that has entered the engine."""
        if not self.samples:
            self._sent_at = now
        self.samples[sample.handle] = sample
        self._checkpoints.begin(sample, now)

    def take_over(self, sample: RunningSample, handle: int, now: float) -> None:
        """Take in a running sample of another stream; what it has not reported goes out with the next flush."""
        sample.handle, sample.stream = handle, self
        self.add(sample, now)
        self._checkpoints.reached(sample)
        self._is_urgent = True

    def reached(self, sample: RunningSample) -> None:
        """Note that a sample has as many unreported tokens as make it due."""
        self._checkpoints.reached(sample)
        self._is_urgent |= sample.streamed

    def finish(self, sample: RunningSample, event: pb.Finished) -> None:
        """Note the end of a sample; its last tokens go out before it, in the same response."""
        self._last(sample)
        self._pending.finished.append(event)

    def move(self, sample: RunningSample, event: pb.Moved) -> None:
        """Note that a sample runs elsewhere now; its last tokens go out before that, in the same response."""
        self._last(sample)
        self._pending.moved.append(event)

    def _last(self, sample: RunningSample) -> None:
        delta = sample.take_delta()
        if delta is not None:
            self._pending.deltas.append(delta)
        self.samples.pop(sample.handle, None)

    def finish_unstarted(self, handle: int) -> None:
        """Note the end of an item that was aborted before it started."""
        reason = sample_pb2.FINISH_REASON_ABORTED
        self._pending.finished.append(pb.Finished(handle=handle, finish_reason=reason))

    def refuse(self, event: pb.Refused) -> None:
        """Note an item that is refused."""
        self._pending.refused.append(event)

    def flush(
        self, load: fleet_pb2.InstanceLoad, policy_version: int, now: float, *, everything: bool = False
    ) -> None:
        """Hand what is due to the event loop, as one response; with `everything` all that there is."""
        pending = self._pending
        calls = bool(pending.finished or pending.refused or pending.moved)
        calls |= bool(self.samples) and now - self._sent_at >= self._rules.message_seconds
        if not (calls or everything or self._is_urgent):
            return
        self._is_urgent = False
        due = self._checkpoints.take(now)
        for sample in self.samples.values() if everything else due:
            if delta := sample.take_delta():
                pending.deltas.append(delta)
        if calls or pending.deltas:
            pending.load.CopyFrom(load)
            pending.policy_version = policy_version
            self.put(pending)
            self._pending, self._sent_at = pb.WorkResponse(), now

    def put(self, event: OutboxEvent) -> None:
        """Append to the outbox from any thread."""
        self.outbox.put(event)
