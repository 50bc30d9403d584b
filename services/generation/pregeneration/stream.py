"""The stream that background samples belong to: what the engine thread tells the event loop about them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.internal.v1 import generation_pb2 as pb
from paceline.v1 import fleet_pb2, sample_pb2
from services.generation.background import Background
from services.generation.samples import RunningSample

POLL_STEPS = 50
"""Engine steps between two reports, until the coordinator says otherwise."""

_BY_ITSELF = {sample_pb2.FINISH_REASON_STOP, sample_pb2.FINISH_REASON_LENGTH}


@dataclass(frozen=True, slots=True)
class Grown:
    """New tokens of a sample and their log-probabilities."""

    handle: int
    tokens: list[int]
    logprobs: list[float]


@dataclass(frozen=True, slots=True)
class Ended:
    """A sample is over: by itself, or because it was ended or could not go on."""

    handle: int
    finished: bool


@dataclass(frozen=True, slots=True)
class Standing:
    """Whether the engine may take background samples, whether real ones are in it, and its policy version."""

    free: bool = False
    serving: bool = False
    version: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """What has happened since the last one. `due`: as many engine steps as lie between two polls."""

    standing: Standing
    due: bool
    grown: list[Grown] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)


class BackgroundStream:
    """Collects what background samples give. A report goes out when `poll_steps` engine steps have passed, when
    a sample has ended, and when the engine becomes free, is needed or has other weights; None at the end.

    Filled by the engine thread, emptied by the event loop.
    """

    background = True

    def __init__(
        self, events: asyncio.AbstractEventLoop, background: Background, is_open: Callable[[], bool]
    ) -> None:
        """`is_open` says whether the instance takes work at all; asked in the engine thread."""
        self.outbox: asyncio.Queue[Report | None] = asyncio.Queue()
        self.samples: dict[int, RunningSample] = {}
        self.poll_steps = POLL_STEPS
        self._events = events
        self._background = background
        self._is_open = is_open
        self._standing = Standing()
        self._reported_at = 0
        self._grown: list[Grown] = []
        self._ended: list[Ended] = []

    def finish(self, sample: RunningSample, event: pb.Finished) -> None:
        """Keep the last tokens of a sample, and that it has ended."""
        self._grow(sample)
        self._ended.append(Ended(sample.handle, event.finish_reason in _BY_ITSELF))
        self.samples.pop(sample.handle, None)

    def refuse(self, event: pb.Refused) -> None:
        """A sample cannot go on."""
        self._ended.append(Ended(event.handle, finished=False))

    def flush(self, load: fleet_pb2.InstanceLoad, policy_version: int) -> None:
        """Report, if there is something to say."""
        real = load.running + load.waiting
        free = self._is_open() and self._background.allowed(real)
        standing = Standing(free, real > 0, policy_version)
        due = bool(self.samples) and self._background.steps - self._reported_at >= self.poll_steps
        if not (due or self._ended or standing != self._standing):
            return
        for sample in self.samples.values():
            self._grow(sample)
        self._send(Report(standing, due, self._grown, self._ended))
        self._standing = standing
        self._grown, self._ended = [], []
        self._reported_at = self._background.steps

    def put(self, event: Exception | None) -> None:
        """The engine has ended, whatever with; what is left of the samples is what they have."""
        for sample in self.samples.values():
            self._grow(sample)
        self._ended += [Ended(handle, finished=False) for handle in self.samples]
        self.samples.clear()
        self._send(Report(Standing(), False, self._grown, self._ended))
        self._grown, self._ended = [], []
        self._send(None)

    def _grow(self, sample: RunningSample) -> None:
        if sample.tokens:
            self._grown.append(Grown(sample.handle, sample.tokens, sample.logprobs))
            sample.tokens, sample.logprobs = [], []

    def _send(self, event: Report | None) -> None:
        self._events.call_soon_threadsafe(self.outbox.put_nowait, event)
