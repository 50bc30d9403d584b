"""Measure the turns of an event loop, and log what ran in the long ones.

Turns are measured as processor time of the loop's thread, so that other load on the machine makes no turn long.
"""

from __future__ import annotations

import asyncio
import gc
import heapq
import selectors
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, TypeVar

import structlog

log = structlog.get_logger(__name__)

K = TypeVar("K")

LONG_TURN = 0.05
"""Seconds of processor time from which a turn is long: a lease, a heartbeat or a call had to wait."""
_SAMPLE_SECONDS = 0.02
# Least seconds between two lines, except for turns that are longer than all before.
_LOG_SECONDS = 10.0
# Innermost calls of a stack, and callbacks of a turn, that are logged at most.
_MAX_CALLS = 12
_MAX_CALLBACKS = 5
_HANDLE_RUN = asyncio.Handle._run.__code__


class TurnSelector(selectors.DefaultSelector):
    """Selector that measures the turns of the loop, from one wait for events to the next.

    It reads each clock twice a turn, however many callbacks the turn has.
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
        """Readings of the two clocks when that turn began; infinite while the loop waits for events."""
        self.ended: Callable[[float, float], None] | None = None
        """Called at the end of each long turn with its processor and wall time."""

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
    """Event loop that measures its turns with the selector `turns`."""

    def __init__(self) -> None:
        self.turns = TurnSelector()
        super().__init__(self.turns)


class TurnProfiler:
    """Profiler of the long turns of an event loop; use it as a context manager, on the loop's thread.

    A thread checks 50 times a second whether the current turn has used half the time of a long one. Only then does
    it take the stack and attribute the processor time since its last check to it.
    """

    def __init__(self, turns: TurnSelector) -> None:
        self._turns = turns
        self._thread_id = threading.get_ident()
        self._clock = time.pthread_getcpuclockid(self._thread_id)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="turn-profiler", daemon=True)
        self._lock = threading.Lock()
        # For turn `_number`: the clock at the last sample, and seconds by callback and by stack.
        self._number, self._sampled_at = -1, 0.0
        self._callbacks: defaultdict[str, float] = defaultdict(float)
        self._stacks: defaultdict[tuple[str, ...], float] = defaultdict(float)
        # Seconds of garbage collections, for turn `_collected_in`.
        self._collecting_since = self._collected = 0.0
        self._collected_in = -1
        self._longest, self._logged_at = 0.0, float("-inf")

    def __enter__(self) -> TurnProfiler:
        gc.callbacks.append(self._collection)
        self._turns.ended = self.ended
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._turns.ended = None
        gc.callbacks.remove(self._collection)
        self._over.set()
        self._thread.join()

    def sample(self) -> None:
        """Take the stack of the loop's thread if its current turn is becoming long."""
        number, begun = self._turns.number, self._turns.begun_cpu
        now = time.clock_gettime(self._clock)
        if now - begun < LONG_TURN / 2:
            return
        callback, stack = _calls(sys._current_frames().get(self._thread_id))
        with self._lock:
            if number != self._turns.number:
                return
            if number != self._number:
                self._number, self._sampled_at = number, begun
                self._callbacks.clear()
                self._stacks.clear()
            spent, self._sampled_at = now - self._sampled_at, now
            self._callbacks[callback] += spent
            self._stacks[stack] += spent

    def ended(self, cpu: float, wall: float) -> None:
        """Log a long turn that ends now, unless it is not the longest so far and a line was logged recently."""
        now = time.monotonic()
        if cpu <= self._longest and now - self._logged_at < _LOG_SECONDS:
            return
        self._longest, self._logged_at = max(self._longest, cpu), now
        collected = self._collected if self._collected_in == self._turns.number else 0.0
        with self._lock:
            seen = self._number == self._turns.number
            callbacks = _longest(self._callbacks, _MAX_CALLBACKS) if seen else []
            stacks = _longest(self._stacks, 1) if seen else []
        log.warning(
            "long_turn",
            cpu_ms=_ms(cpu),
            wall_ms=_ms(wall),
            collection_ms=_ms(collected),
            callbacks={name: _ms(seconds) for name, seconds in callbacks},
            calls=[call for stack, _ in stacks for call in stack],
        )

    def _run(self) -> None:
        while not self._over.wait(_SAMPLE_SECONDS):
            self.sample()

    def _collection(self, phase: str, info: dict[str, Any]) -> None:
        if threading.get_ident() != self._thread_id:
            return
        if self._collected_in != self._turns.number:
            self._collected_in, self._collected = self._turns.number, 0.0
        if phase == "start":
            self._collecting_since = time.thread_time()
        else:
            self._collected += time.thread_time() - self._collecting_since


def _longest(seconds: Mapping[K, float], count: int) -> list[tuple[K, float]]:
    return heapq.nlargest(count, seconds.items(), key=lambda item: item[1])


def _calls(frame: FrameType | None) -> tuple[str, tuple[str, ...]]:
    """Return the running callback of the loop, and the innermost calls of its stack, innermost first."""
    calls: list[str] = []
    while frame is not None and frame.f_code is not _HANDLE_RUN:
        calls.append(_name(frame))
        frame = frame.f_back
    return (calls[-1] if calls else "the event loop"), tuple(calls[:_MAX_CALLS])


def _name(frame: FrameType) -> str:
    code = frame.f_code
    file = "/".join(code.co_filename.rsplit("/", 2)[-2:])
    return f"{code.co_qualname} ({file}:{frame.f_lineno})"


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 1)
