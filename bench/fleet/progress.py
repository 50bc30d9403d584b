"""Progress of the fleet benchmark: how far the run is, and how long it will take."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from typing import Self

_SHOWN_EVERY = 10.0


class Progress:
    """Lines on stderr, at each change and every ten seconds. Use it as an asynchronous context manager.

    `planned` has the seconds that each fleet size should take. It is corrected by what the sizes before took.
    """

    def __init__(self, planned: Sequence[tuple[int, float]], samples: int) -> None:
        self._planned = list(planned)
        self._samples = samples
        self._size = self._ended = 0
        self._doing = ""
        self._began = time.monotonic()
        # Seconds taken and planned of the sizes that are done.
        self._took = self._should = 0.0

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._repeat())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()

    def begin(self, instances: int) -> None:
        """Begin with a fleet."""
        self._size, self._ended, self._began = instances, 0, time.monotonic()
        self.show("starting")

    def ended(self) -> None:
        """Count a sample."""
        self._ended += 1

    def done(self) -> None:
        """Record that the figures of a fleet are there."""
        self._took += time.monotonic() - self._began
        self._should += self._planned.pop(0)[1]
        self.show("done")

    def seconds_left(self) -> float:
        """Return how long the run should take from now on."""
        pace = self._took / self._should if self._should else 1.0
        left = pace * sum(seconds for _, seconds in self._planned)
        if not self._planned or self._planned[0][0] != self._size:
            return left
        spent, planned = time.monotonic() - self._began, pace * self._planned[0][1]
        unfinished = 1 - self._ended / (self._size * self._samples)
        return left - planned + max(planned - spent, unfinished * spent)

    def show(self, doing: str) -> None:
        """Print a line, and what is being done in those that follow."""
        self._doing = doing
        samples = f"{self._ended:,} of {self._size * self._samples:,} samples"
        left = self.seconds_left()
        print(
            f"{self._size} instances: {doing}, {samples}, about {left:.0f} s left",
            file=sys.stderr,
            flush=True,
        )

    async def _repeat(self) -> None:
        while True:
            await asyncio.sleep(_SHOWN_EVERY)
            self.show(self._doing)
