"""The stream of background samples: reports of the engine thread to the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.internal.v1 import generation_pb2 as pb
from paceline.v1 import fleet_pb2, sample_pb2
from services.generation.loop.sample_table import SampleTable
from services.generation.loop.samples import RunningSample

POLL_STEPS = 50
"""Engine steps between two reports, until the coordinator says otherwise."""

_FINISHED = {sample_pb2.FINISH_REASON_STOP, sample_pb2.FINISH_REASON_LENGTH}


@dataclass(frozen=True, slots=True)
class EngineAvailability:
    """State of the engine: free for background samples, serving real ones, and its policy version."""

    free: bool = False
    serving: bool = False
    version: int = 0


@dataclass(frozen=True, slots=True)
class PollSituation:
    """The instance as the poller sees it.

    `running` tasks and `forks` are being generated; `news`: a task has ended that the coordinator does not know of;
    `due`: it is time to report.
    """

    engine: EngineAvailability
    running: int
    news: bool
    due: bool
    forks: int = 0

    @property
    def calls_for_poll(self) -> bool:
        """True if there is something to report, or more that could be done.

        Beside real work no task is asked for, but tasks that it interrupted are given back for others to go on.
        """
        return self.news or (self.engine.free and (self.due or not self.running))

    def room(self, seats: int, reserved: int) -> int:
        """Return how many tasks could start now, of `seats` samples at once; `reserved` are for real ones."""
        return max(0, seats - reserved - self.running - self.forks) if self.engine.free else 0


@dataclass(frozen=True, slots=True)
class BackgroundReport:
    """Events since the last report.

    `due`: as many engine steps have passed as lie between two polls. `ended` holds (handle, finished) of samples
    that are over; finished is False when a sample was ended or could not go on.
    """

    engine: EngineAvailability
    due: bool
    deltas: list[pb.Delta] = field(default_factory=list)
    ended: list[tuple[int, bool]] = field(default_factory=list)


class BackgroundStream:
    """Collects the tokens of background samples.

    Sends a report when `poll_steps` engine steps have passed, when a sample has ended, and when the engine becomes
    free, is needed or has other weights; None at the end. Filled by the engine thread, emptied by the event loop.
    """

    background = True

    def __init__(
        self, events: asyncio.AbstractEventLoop, table: SampleTable, is_open: Callable[[], bool]
    ) -> None:
        """`is_open` returns True if the instance takes work at all; called in the engine thread."""
        self.outbox: asyncio.Queue[BackgroundReport | None] = asyncio.Queue()
        self.samples: dict[int, RunningSample] = {}
        self.poll_steps = POLL_STEPS
        self._events = events
        self._table = table
        self._is_open = is_open
        self._engine = EngineAvailability()
        self._reported_at = 0
        self._deltas: list[pb.Delta] = []
        self._ended: list[tuple[int, bool]] = []

    def add(self, sample: RunningSample, now: float) -> None:
        """Take in a sample that has entered the engine."""
        self.samples[sample.handle] = sample

    def reached(self, sample: RunningSample) -> None:
        """Do nothing: background samples report after a number of engine steps."""

    def finish(self, sample: RunningSample, event: pb.Finished) -> None:
        """Keep the last tokens of a sample that has ended."""
        self._grow(sample)
        self._ended.append((sample.handle, event.finish_reason in _FINISHED))
        self.samples.pop(sample.handle, None)

    def refuse(self, event: pb.Refused) -> None:
        """Note that a sample cannot go on."""
        self._ended.append((event.handle, False))

    def flush(
        self, load: fleet_pb2.InstanceLoad, policy_version: int, now: float, *, everything: bool = False
    ) -> None:
        """Send a report, if there is something to say."""
        real = load.running + load.waiting
        free = self._is_open() and self._table.allows_background(real)
        engine = EngineAvailability(free, real > 0, policy_version)
        due = bool(self.samples) and self._table.background_steps - self._reported_at >= self.poll_steps
        if due or self._ended or engine != self._engine:
            self._report(engine, due)
            self._engine = engine
            self._reported_at = self._table.background_steps

    def put(self, event: Exception | None) -> None:
        """End the stream with the engine: the samples keep the tokens that they have."""
        self._ended += [(handle, False) for handle in self.samples]
        self._report(EngineAvailability(), False)
        self.samples.clear()
        self._send(None)

    def _report(self, engine: EngineAvailability, due: bool) -> None:
        for sample in self.samples.values():
            self._grow(sample)
        self._send(BackgroundReport(engine, due, self._deltas, self._ended))
        self._deltas, self._ended = [], []

    def _grow(self, sample: RunningSample) -> None:
        if delta := sample.take_delta():
            self._deltas.append(delta)

    def _send(self, event: BackgroundReport | None) -> None:
        self._events.call_soon_threadsafe(self.outbox.put_nowait, event)
