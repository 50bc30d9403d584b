"""Stream of one caller of an instance: its samples, and when it reports their tokens and ends.

A sample is a function of its seed and its prefix, so the report of an unfinished one only saves work if its
instance is lost. It therefore reports in checkpoints, after a number of tokens or seconds. A streamed sample, whose
caller reads along, is due with every token. The engine thread fills the outbox of a stream, and the event loop
empties it.
"""

from __future__ import annotations

import asyncio
import heapq
import random
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from paceline.internal.v1 import generation_pb2 as pb
from paceline.v1 import fleet_pb2, sample_pb2
from services.generation.loop.samples import RunningSample

# Golden ratio: any number of its multiples, modulo 1, is spread evenly.
_SPREAD = 0.6180339887498949
# Number of messages that the checkpoints of a stream are spread over, and the longest time between two of them.
_MESSAGES = 5
_LONGEST_MESSAGE_INTERVAL = 1.0
# A stream whose caller requests fewer messages is silent for this number of its intervals, unless a sample ends.
_SILENT_INTERVALS = 4
_LONGEST_SILENCE = 2.0
LONGEST_INTERVAL = 1.0
"""Longest time in seconds that a caller may have ends held back."""
MOST_BYTES = 1 << 20
"""Size to which responses are merged: far below the size limit of messages, and quickly read by the gateway."""


class ReportingSample(Protocol):
    """Sample that reports its tokens."""

    handle: int
    streamed: bool
    """True if its caller reads along: tokens are reported as they are generated."""
    quota: int
    """Unreported tokens that make it due."""
    report_at: float
    """Time at which it is due."""

    def take_delta(self) -> pb.Delta | None:
        """Return the tokens since the last call; None if there are none."""


S = TypeVar("S", bound=ReportingSample)


@dataclass(frozen=True, slots=True)
class CheckpointRules:
    """Unreported tokens, or seconds since the last report, after which a sample is due to report."""

    tokens: int = 512
    seconds: float = 5.0

    @property
    def message_seconds(self) -> float:
        """Least time between two messages that are sent only for checkpoints and the load."""
        return min(self.seconds / _MESSAGES, _LONGEST_MESSAGE_INTERVAL)


class Checkpoints(Generic[S]):
    """Due reports of the samples of one stream; costs nothing for a sample that is not due.

    The first checkpoint of a sample comes after a part of the interval, a different part for each sample. So
    samples that were started together do not report together, and a sample whose instances die repeatedly before it
    is due still makes some progress.
    """

    def __init__(self, rules: CheckpointRules, samples: Mapping[int, S], offset: float = 0.0) -> None:
        """Watch `samples`, by handle; a sample that was removed is never due. `offset` shifts the parts."""
        self._rules = rules
        self._samples = samples
        self._offset = offset
        self._full: dict[int, S] = {}
        # One entry for each sample: the time of its next check, a number to order by, and the sample.
        self._times: list[tuple[float, int, S]] = []
        self._begun = 0

    def begin(self, sample: S, now: float) -> None:
        """Watch a sample from now on."""
        if sample.streamed:
            sample.quota = 1
            return
        self._begun += 1
        part = (self._offset + self._begun * _SPREAD) % 1.0
        sample.quota = 1 + int(part * (self._rules.tokens - 1))
        sample.report_at = now + part * self._rules.seconds
        heapq.heappush(self._times, (sample.report_at, self._begun, sample))

    def reached(self, sample: S) -> None:
        """Record that a sample has `quota` unreported tokens, or is to report for another reason."""
        self._full[sample.handle] = sample

    def take(self, now: float) -> list[S]:
        """Return the samples that are due, and restart their intervals."""
        full, self._full = self._full, {}
        due = [sample for sample in full.values() if self._has(sample)]
        for sample in due:
            self._renew(sample, now)
        while self._times and self._times[0][0] <= now:
            _, number, sample = heapq.heappop(self._times)
            if not self._has(sample):
                continue
            if sample.report_at <= now:
                due.append(sample)
                self._renew(sample, now)
            heapq.heappush(self._times, (sample.report_at, number, sample))
        return due

    def _has(self, sample: S) -> bool:
        return self._samples.get(sample.handle) is sample

    def _renew(self, sample: S, now: float) -> None:
        if not sample.streamed:
            sample.quota, sample.report_at = self._rules.tokens, now + self._rules.seconds


OutboxEvent = pb.WorkResponse | Exception | None


class ResponseOutbox:
    """Responses that the caller of a stream has not read yet. None or an exception ends the stream.

    While a response waits for a slow caller, later ones are merged into it: one delta per sample and policy
    version, one load. So the waiting responses are bounded by the tokens of the samples that the caller has
    started, however slowly it reads. Filled by any thread, emptied by the event loop.
    """

    def __init__(self, events: asyncio.AbstractEventLoop) -> None:
        self._events = events
        self._news = asyncio.Event()
        self._lock = threading.Lock()
        self._waiting: deque[OutboxEvent] = deque()
        # Size of the last waiting response, and once another was merged into it, its deltas by handle.
        self._bytes = 0
        self._deltas: dict[int, pb.Delta] = {}

    def put(self, event: OutboxEvent) -> None:
        """Append an event; from any thread. The caller must not use a response after this."""
        with self._lock:
            is_first = not self._waiting
            last = self._waiting[-1] if self._waiting else None
            size = event.ByteSize() if isinstance(event, pb.WorkResponse) else MOST_BYTES + 1
            if last is None or self._bytes + size > MOST_BYTES:
                self._waiting.append(event)
                self._bytes, self._deltas = size, {}
            elif isinstance(event, pb.WorkResponse) and isinstance(last, pb.WorkResponse):
                self._merge(last, event)
                self._bytes += size
        if is_first:
            self._events.call_soon_threadsafe(self._news.set)

    async def get(self) -> OutboxEvent:
        """Remove and return the next event, once there is one. For one caller at a time."""
        while True:
            self._news.clear()
            if not self.empty():
                return self.get_nowait()
            await self._news.wait()

    def get_nowait(self) -> OutboxEvent:
        """Remove and return the next event; IndexError if there is none."""
        with self._lock:
            return self._waiting.popleft()

    def empty(self) -> bool:
        """Return True if no event waits."""
        return not self._waiting

    def _merge(self, last: pb.WorkResponse, event: pb.WorkResponse) -> None:
        if not self._deltas:
            self._deltas = {delta.handle: delta for delta in last.deltas}
        for delta in event.deltas:
            known = self._deltas.get(delta.handle)
            if known is None:
                self._deltas[delta.handle] = last.deltas.add()
                self._deltas[delta.handle].CopyFrom(delta)
            else:
                # Appends to its columns, runs of versions included.
                known.MergeFrom(delta)
        last.finished.extend(event.finished)
        last.refused.extend(event.refused)
        last.moved.extend(event.moved)
        last.load.CopyFrom(event.load)
        last.policy_version = event.policy_version


class ReportingStream(Generic[S]):
    """Samples of one caller, by handle, and the events that were not sent yet.

    A response is sent if a sample has ended or a streamed one has new tokens; otherwise, while samples run, at
    longer intervals, with the load. It has the new tokens of all samples that are due to report. A caller with many
    streams may request fewer responses: then ends wait until `interval` seconds after the last response, unless no
    other sample runs or the caller itself ended the sample. Filled by one thread, emptied by the event loop.
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
        """Hold ends back for `interval` seconds after a response."""
        self._interval = min(max(0.0, interval), LONGEST_INTERVAL)
        fewer = min(_SILENT_INTERVALS * self._interval, _LONGEST_SILENCE, self._rules.seconds / 2)
        self._silence = max(self._rules.message_seconds, fewer)

    def add(self, sample: S, now: float) -> None:
        """Add a sample that has entered the engine."""
        if not self.samples:
            self._sent_at = now
        self.samples[sample.handle] = sample
        self._checkpoints.begin(sample, now)

    def reached(self, sample: S) -> None:
        """Record that a sample has `quota` unreported tokens."""
        self._checkpoints.reached(sample)
        self._is_urgent |= sample.streamed

    def finish(self, sample: S, event: pb.Finished) -> None:
        """Record the end of a sample; its last tokens are sent in the same response."""
        self._last(sample)
        self._pending.finished.append(event)
        asked_for = event.finish_reason == sample_pb2.FINISH_REASON_ABORTED
        self._is_urgent |= sample.streamed or asked_for

    def move(self, sample: S, event: pb.Moved) -> None:
        """Record that a sample runs elsewhere now; its last tokens are sent in the same response."""
        self._last(sample)
        self._pending.moved.append(event)
        self._is_urgent = True

    def _last(self, sample: S) -> None:
        delta = sample.take_delta()
        if delta is not None:
            self._pending.deltas.append(delta)
        self.samples.pop(sample.handle, None)

    def finish_unstarted(self, handle: int) -> None:
        """Record the end of an item that was aborted before it started."""
        reason = sample_pb2.FINISH_REASON_ABORTED
        self._pending.finished.append(pb.Finished(handle=handle, finish_reason=reason))
        self._is_urgent = True

    def refuse(self, event: pb.Refused) -> None:
        """Record an item that is refused."""
        self._pending.refused.append(event)
        self._is_urgent = True

    def flush(
        self, load: fleet_pb2.InstanceLoad, policy_version: int, now: float, *, everything: bool = False
    ) -> None:
        """Send what is due to the event loop as one response; with `everything` all pending tokens."""
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


class WorkStream(ReportingStream[RunningSample]):
    """Stream of samples of the engine. Filled by the engine thread, emptied by the event loop."""

    background = False

    def __init__(self, events: asyncio.AbstractEventLoop, rules: CheckpointRules | None = None) -> None:
        super().__init__(events, rules)
        # Items that wait for their cached rollouts or schemas before they start, by handle.
        self.parked: dict[int, pb.WorkItem] = {}

    def take_over(self, sample: RunningSample, handle: int, now: float) -> None:
        """Take over a running sample of another stream; its unreported tokens are sent with the next flush."""
        sample.handle, sample.stream = handle, self
        self.add(sample, now)
        self._checkpoints.reached(sample)
        self._is_urgent = True
