"""Times of an engine thread, turn by turn, and where they went.

Wall time of a turn is its processor time, the time that the thread was ready and had no core (the kernel's run
queue), and the time that it slept. A turn with work has nothing to sleep for on a CPU but the GIL.
"""

from __future__ import annotations

import gc
import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_WARM_UP = 3
"""Turns that do not count: the first in which all samples decode."""
_OTHERS_EVERY = 8
"""Turns between two looks at the other threads, which take a while."""


@dataclass(slots=True)
class PartTime:
    """Seconds of one part of the turns: by the clock, and of the thread's processor time."""

    wall: float = 0.0
    cpu: float = 0.0


@dataclass(slots=True)
class TurnTimes:
    """Sums over `turns` turns, in seconds: by the clock, of processor time, and of waiting for a core.

    `others` is the processor time of all other threads by their name, over the first `others_turns` of the turns.
    """

    turns: int = 0
    wall: float = 0.0
    cpu: float = 0.0
    queued: float = 0.0
    switches: int = 0
    """Times that the thread went to sleep: on a CPU, because another one had the GIL."""
    parts: dict[str, PartTime] = field(default_factory=dict)
    others: dict[str, float] = field(default_factory=dict)
    others_queued: float = 0.0
    others_turns: int = 0
    collecting: dict[int, float] = field(default_factory=dict)
    """Processor time of Python's collection of garbage within the turns, by generation; in `cpu`, too."""


class TurnClock:
    """Clock in an engine loop. `begin` and `end` are called from another thread, before and after the samples."""

    def __init__(self, loop: Any) -> None:
        """Put the clock into a loop, whose thread has started and has its engine."""
        self._loop = loop
        self._thread = str(loop.native_id)
        self._schedstat = os.open(f"/proc/self/task/{self._thread}/schedstat", os.O_RDONLY)
        self._full = sys.maxsize
        self._seen = 0
        self._stepped = 0
        self._times = TurnTimes()
        # Of the turn under way; they are added to the sums if it counts.
        self._parts: dict[str, PartTime] = {}
        self._others: dict[str, tuple[str, float, float]] = {}
        self._collecting: dict[int, float] = {}
        self._collected_from = 0.0
        gc.callbacks.append(self._collect)
        self._turn: Callable[[], None] = loop._turn
        loop._turn = self._timed_turn
        loop._record = self._counted(loop._record)
        engine = loop.ready.result()
        for owner, name in ((engine, "step"), (loop, "_record"), (loop, "flush")):
            setattr(owner, name, self._timed_part(name.removeprefix("_"), getattr(owner, name)))

    @property
    def thread(self) -> int:
        """Thread id of the engine thread."""
        return int(self._thread)

    def begin(self, full: int) -> None:
        """Count the turns from now on in which `full` samples get tokens."""
        self._times, self._seen, self._full = TurnTimes(), 0, full

    def end(self) -> TurnTimes:
        """Stop counting, and return the times."""
        self._full = sys.maxsize
        return self._times

    def _timed_turn(self) -> None:
        if self._full == sys.maxsize:
            self._turn()
            return
        if self._seen >= _WARM_UP and not self._times.turns:
            self._others = threads(self._thread)
        # Another round may begin within a turn, in which the thread waits for samples.
        found = self._times
        self._stepped, self._collecting, self._parts = 0, {}, {}
        switches = self._switches()
        cpu, queued = self._scheduled()
        began = time.perf_counter()
        self._turn()
        wall = time.perf_counter() - began
        after, queued_after = self._scheduled()
        # Not the turn in which samples end, and is done for each of them what is done once.
        if self._stepped != self._full or len(self._loop.samples) < self._full or self._seen < _WARM_UP:
            self._seen += self._stepped == self._full
            return
        found.turns += 1
        found.wall += wall
        found.cpu += after - cpu
        found.queued += queued_after - queued
        found.switches += self._switches() - switches
        for name, part in self._parts.items():
            total = found.parts.setdefault(name, PartTime())
            total.wall += part.wall
            total.cpu += part.cpu
        for generation, seconds in self._collecting.items():
            found.collecting[generation] = found.collecting.get(generation, 0.0) + seconds
        if found.turns % _OTHERS_EVERY == 0:
            # Not at the end, which nobody knows of beforehand.
            self._add_others(found)

    def _add_others(self, found: TurnTimes) -> None:
        now = threads(self._thread)
        for thread, (name, cpu, queued) in now.items():
            _, cpu_before, queued_before = self._others.get(thread, (name, 0.0, 0.0))
            found.others[name] = found.others.get(name, 0.0) + cpu - cpu_before
            found.others_queued += queued - queued_before
        self._others, found.others_turns = now, found.turns

    def _scheduled(self) -> tuple[float, float]:
        """Return the seconds that the thread ran, and those that it waited for a core."""
        # What the kernel says of the time that it ran is as old as its last tick.
        _, waited, _ = os.pread(self._schedstat, 100, 0).split()
        return time.thread_time(), int(waited) / 1e9

    def _switches(self) -> int:
        """Return how often the thread has given up its core by itself."""
        return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw

    def _collect(self, phase: str, info: dict[str, int]) -> None:
        if threading.get_native_id() != self.thread:
            return
        if phase == "start":
            self._collected_from = time.thread_time()
        else:
            seconds = time.thread_time() - self._collected_from
            generation = info["generation"]
            self._collecting[generation] = self._collecting.get(generation, 0.0) + seconds

    def _counted(self, record: Callable[..., None]) -> Callable[..., None]:
        def counted(steps: list[Any], began: float) -> None:
            self._stepped = len(steps)
            record(steps, began)

        return counted

    def _timed_part(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began, cpu = time.perf_counter(), time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                part = self._parts.setdefault(name, PartTime())
                part.wall += time.perf_counter() - began
                part.cpu += time.thread_time() - cpu

        return timed


def threads(but: str) -> dict[str, tuple[str, float, float]]:
    """Return the threads of this process except one: name, seconds that they ran, and waited for a core."""
    found = {}
    for folder in Path("/proc/self/task").iterdir():
        if folder.name == but:
            continue
        try:
            ran, waited, _ = (folder / "schedstat").read_text().split()
            name = (folder / "comm").read_text().strip()
        except (FileNotFoundError, ProcessLookupError):  # It has ended.
            continue
        if folder.name == str(os.getpid()):
            name = "event loop"
        found[folder.name] = (name, int(ran) / 1e9, int(waited) / 1e9)
    return found
