"""Reports of the samples of a stream: when its caller is told of them, and what."""

from __future__ import annotations

import asyncio
import random
from typing import Generic

from paceline.internal.v1 import generation_pb2 as pb
from paceline.v1 import fleet_pb2, sample_pb2
from services.generation.loop.checkpoints import CheckpointRules, Checkpoints, S
from services.generation.loop.outbox import OutboxEvent, ResponseOutbox

# A stream whose caller asks for fewer messages is silent for so many intervals, unless a sample ends.
_SILENT_INTERVALS = 4
_LONGEST_SILENCE = 2.0
LONGEST_INTERVAL = 1.0
"""Longest time in seconds that a caller may have ends held back."""


class ReportingStream(Generic[S]):
    """Samples of one caller, by handle, and the events that were not sent yet.

    A response goes out if a sample has ended or a streamed one has new tokens; otherwise, while samples run, now
    and then, with the load. It has the new tokens of all samples that are due to report. A caller with many streams
    may ask for fewer responses: then ends wait until `interval` seconds after the last response, except where no
    other sample runs or the end was asked for. Filled by one thread, emptied by the event loop.
    """

    def __init__(self, events: asyncio.AbstractEventLoop, rules: CheckpointRules | None = None) -> None:
        self.outbox = ResponseOutbox(events)
        self.samples: dict[int, S] = {}
        self._rules = rules or CheckpointRules()
        self._checkpoints = Checkpoints(self._rules, self.samples, random.random())
        self._interval = 0.0
        self._silence = self._rules.message_seconds
        self._pending = pb.WorkResponse()
        self._is_urgent = False
        self._sent_at = 0.0

    def report_every(self, interval: float) -> None:
        """Hold ends back for so many seconds after a response."""
        self._interval = min(max(0.0, interval), LONGEST_INTERVAL)
        fewer = min(_SILENT_INTERVALS * self._interval, _LONGEST_SILENCE, self._rules.seconds / 2)
        self._silence = max(self._rules.message_seconds, fewer)

    def add(self, sample: S, now: float) -> None:
        """Take in a sample that has entered the engine."""
        if not self.samples:
            self._sent_at = now
        self.samples[sample.handle] = sample
        self._checkpoints.begin(sample, now)

    def reached(self, sample: S) -> None:
        """Note that a sample has as many unreported tokens as make it due."""
        self._checkpoints.reached(sample)
        self._is_urgent |= sample.streamed

    def finish(self, sample: S, event: pb.Finished) -> None:
        """Note the end of a sample; its last tokens go out before it, in the same response."""
        self._last(sample)
        self._pending.finished.append(event)
        asked_for = event.finish_reason == sample_pb2.FINISH_REASON_ABORTED
        self._is_urgent |= sample.streamed or asked_for

    def move(self, sample: S, event: pb.Moved) -> None:
        """Note that a sample runs elsewhere now; its last tokens go out before that, in the same response."""
        self._last(sample)
        self._pending.moved.append(event)
        self._is_urgent = True

    def _last(self, sample: S) -> None:
        delta = sample.take_delta()
        if delta is not None:
            self._pending.deltas.append(delta)
        self.samples.pop(sample.handle, None)

    def finish_unstarted(self, handle: int) -> None:
        """Note the end of an item that was aborted before it started."""
        reason = sample_pb2.FINISH_REASON_ABORTED
        self._pending.finished.append(pb.Finished(handle=handle, finish_reason=reason))
        self._is_urgent = True

    def refuse(self, event: pb.Refused) -> None:
        """Note an item that is refused."""
        self._pending.refused.append(event)
        self._is_urgent = True

    def flush(
        self, load: fleet_pb2.InstanceLoad, policy_version: int, now: float, *, everything: bool = False
    ) -> None:
        """Hand what is due to the event loop, as one response; with `everything` all that there is."""
        pending, quiet = self._pending, now - self._sent_at
        ends = bool(pending.finished) and (not self.samples or quiet >= self._interval)
        calls = ends or (bool(self.samples) and quiet >= self._silence)
        if not (calls or everything or self._is_urgent):
            return
        self._is_urgent = False
        due = self._checkpoints.take(now)
        for sample in self.samples.values() if everything else due:
            if delta := sample.take_delta():
                pending.deltas.append(delta)
        if calls or pending.deltas or pending.finished or pending.refused or pending.moved:
            pending.load.CopyFrom(load)
            pending.policy_version = policy_version
            self.put(pending)
            self._pending, self._sent_at = pb.WorkResponse(), now

    def put(self, event: OutboxEvent) -> None:
        """Append to the outbox from any thread."""
        self.outbox.put(event)
