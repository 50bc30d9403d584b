"""Progress of simulations that take longer than ten seconds: samples that have ended, and the time that is left."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

_EVERY = 10.0


class SimulationProgress:
    """Lines on stderr, one every ten seconds. `samples` of all steps are expected in all; 0 is unknown."""

    def __init__(
        self, samples: int, clock: Callable[[], float] = time.monotonic, out: TextIO | None = None
    ) -> None:
        self._expected = samples
        self._clock = clock
        self._out = sys.stderr if out is None else out
        self._began = self._shown = clock()
        self._ended = 0

    def __call__(self, ended: int, left: int) -> None:
        """Count samples that have ended."""
        self._ended += ended
        now = self._clock()
        if now - self._shown < _EVERY:
            return
        self._shown, took = now, now - self._began
        line = f"{self._ended:,} samples simulated in {took:.0f} s"
        if self._expected > self._ended:
            line += f", about {took / self._ended * (self._expected - self._ended):.0f} s left"
        print(line, file=self._out, flush=True)
