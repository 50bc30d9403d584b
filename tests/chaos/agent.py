"""Agent of chaos: carries out a sequence of kills and stalls on a local platform."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from services.local import Platform
from tests.chaos.sequence import Event, Kind

REDIS = "redis"
_LOOK_SECONDS = 0.2
_BACK_SECONDS = 60.0


def victims(platform: Platform) -> list[str]:
    """Return the names of all processes of a platform, Redis included."""
    return [*(child.spec.name for child in platform.processes), REDIS]


@dataclass
class Agent:
    """Use it in the main thread, since Redis dies with the thread that starts it.

    `wait(seconds)` lets time pass and raises when there is no point in going on; `tell(n, event)` is called after
    each event.
    """

    platform: Platform
    wait: Callable[[float], None]
    tell: Callable[[int, Event], None]
    done: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Events by kind and process."""
    _ending: dict[str, tuple[float, Callable[[], object]]] = field(default_factory=dict)
    """When a stall is over, by process, and what ends it."""

    def run(self, events: Sequence[Event]) -> None:
        """Carry out all events; return when the last stall is over."""
        for number, event in enumerate(events, 1):
            self._pass(event.pause)
            self._end(event.process)
            self._strike(event)
            self.done[event.kind, event.process] += 1
            self.tell(number, event)
        while self._ending:
            self._pass(_LOOK_SECONDS)

    def end_stalls(self) -> None:
        """End all stalls now."""
        for process in list(self._ending):
            self._end(process)

    def _strike(self, event: Event) -> None:
        if event.process == REDIS:
            return self._strike_redis(event)
        child = self.platform.process(event.process)
        # One that was just killed is killed again as soon as it has begun to start.
        deadline = time.monotonic() + _BACK_SECONDS
        while not child.alive:
            assert time.monotonic() < deadline, f"{event.process} is not started again.\n{child.tail()}"
            self._pass(_LOOK_SECONDS / 10)
        if event.kind is Kind.KILL:
            return child.kill()
        child.signal(signal.SIGSTOP)
        self._end_after(event, lambda: child.signal(signal.SIGCONT))

    def _strike_redis(self, event: Event) -> None:
        redis = self.platform.redis
        assert redis is not None, "the platform has a Redis of its own"
        if event.kind is Kind.KILL:
            redis.kill()
            return self._end_after(event, redis.start)
        pid = redis.pid
        assert pid is not None, "what ended it is over"
        os.kill(pid, signal.SIGSTOP)
        self._end_after(event, lambda: os.kill(pid, signal.SIGCONT))

    def _end_after(self, event: Event, end: Callable[[], object]) -> None:
        self._ending[event.process] = time.monotonic() + event.seconds, end

    def _end(self, process: str) -> None:
        with suppress(KeyError, ProcessLookupError):
            self._ending.pop(process)[1]()

    def _pass(self, seconds: float) -> None:
        """Let time pass, and end the stalls that are due meanwhile."""
        until = time.monotonic() + seconds
        while (now := time.monotonic()) < until:
            due = [process for process, (when, _) in self._ending.items() if when <= now]
            for process in due:
                self._end(process)
            soonest = min([until, *(when for when, _ in self._ending.values())])
            self.wait(max(0.0, min(soonest - now, _LOOK_SECONDS)))
