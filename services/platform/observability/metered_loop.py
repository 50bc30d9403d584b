"""Event loop that knows its longest turn."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable
from typing import Any

LONG_TURN = 0.05
"""Seconds of processor time that make a turn a long one: a lease, a heartbeat or a call has waited for them."""


class TurnSelector(selectors.DefaultSelector):
    """Selector that measures what is done between one wait for events and the next: a turn of the loop.

    That costs two looks at each clock a turn, whatever number of callbacks it has.
    """

    def __init__(self) -> None:
        super().__init__()
        self.longest_cpu = 0.0
        """Longest turn in seconds of the thread's own processor time."""
        self.longest_wall = 0.0
        """Longest turn in seconds of wall time."""
        self.number = 0
        """Number of the turn under way."""
        self.begun_cpu = self.begun_wall = float("inf")
        """Readings of the two clocks when it began; infinite while the loop waits for events."""
        self.ended: Callable[[float, float], None] | None = None
        """Called after each long turn with its processor and wall time, as the last part of it."""

    def select(self, timeout: float | None = None) -> list[Any]:
        """Wait for events, as any selector does."""
        cpu, wall = time.thread_time() - self.begun_cpu, time.perf_counter() - self.begun_wall
        self.longest_cpu, self.longest_wall = max(self.longest_cpu, cpu), max(self.longest_wall, wall)
        if cpu >= LONG_TURN and self.ended is not None:
            self.ended(cpu, wall)
        self.begun_cpu = float("inf")
        try:
            return super().select(timeout)
        finally:
            self.number += 1
            self.begun_cpu, self.begun_wall = time.thread_time(), time.perf_counter()


class MeteredLoop(asyncio.SelectorEventLoop):
    """Event loop of which `turns` has the longest turn so far."""

    def __init__(self) -> None:
        self.turns = TurnSelector()
        super().__init__(self.turns)
