"""Stream of one caller of an instance: its samples, and when and what it is told of them."""

from __future__ import annotations

import asyncio

from paceline.internal.v1 import generation_pb2 as pb
from services.generation.loop.checkpoints import CheckpointRules
from services.generation.loop.reporting import ReportingStream
from services.generation.loop.samples import RunningSample


class WorkStream(ReportingStream[RunningSample]):
    """Stream of samples of the engine. Filled by the engine thread, emptied by the event loop."""

    background = False

    def __init__(self, events: asyncio.AbstractEventLoop, rules: CheckpointRules | None = None) -> None:
        super().__init__(events, rules)
        # Items that wait for their cached rollouts before they start, by handle.
        self.parked: dict[int, pb.WorkItem] = {}

    def take_over(self, sample: RunningSample, handle: int, now: float) -> None:
        """Take in a running sample of another stream; what it has not reported goes out with the next flush."""
        sample.handle, sample.stream = handle, self
        self.add(sample, now)
        self._checkpoints.reached(sample)
        self._is_urgent = True
