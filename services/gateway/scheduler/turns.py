"""Split long work on the event loop into turns that are short enough not to delay anything else."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import deque
from collections.abc import Generator
from itertools import count
from typing import Any, TypeVar

R = TypeVar("R")

Steps = Generator[None, None, None]

LONGEST_TURN = 0.002
"""Seconds of work after which control returns to the event loop."""
# Most waiters that are woken in one turn.
_MOST_WOKEN = 64


class Pace:
    """Time budget that the messages and changes of all instances share in one turn of the event loop."""

    def __init__(self, seconds: float = 5 * LONGEST_TURN) -> None:
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        # None until the first waiter of a turn proceeds.
        self._until: float | None = None
        self._end_due = False
        # A heap of the waiters, in order of arrival.
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._numbers = count()

    async def wait(self) -> None:
        """Yield to the event loop once this turn's budget is spent; waiters resume in FIFO order."""
        if not self._waiting and self._has_time():
            return
        number = next(self._numbers)
        while True:
            turn: asyncio.Future[None] = self._loop.create_future()
            heapq.heappush(self._waiting, (number, turn))
            self._end_soon()
            await turn
            if self._has_time():
                return

    def _has_time(self) -> bool:
        now = time.perf_counter()
        if self._until is None:
            self._until = now + self._seconds
            self._end_soon()
            return True
        return now < self._until

    def _end_soon(self) -> None:
        if not self._end_due:
            self._end_due = True
            self._loop.call_soon(self._end_turn)

    def _end_turn(self) -> None:
        self._end_due, self._until = False, None
        # Not all: there is no time for all, and waking a thousand takes milliseconds.
        for _ in range(min(_MOST_WOKEN, len(self._waiting))):
            _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
        if self._waiting:
            self._end_soon()


class Turns:
    """Runner of work that has many steps, in order of arrival.

    It uses `seconds` of each turn of the event loop, and does at least one step. Work is a generator that yields
    after each step of some microseconds. What fits into the current turn is done before `run` returns. Anything may
    happen between two steps, so each step must examine the state again; only other work of the same runner comes
    strictly before or after.
    """

    def __init__(self, seconds: float = LONGEST_TURN) -> None:
        self._seconds = seconds
        self._work: deque[tuple[Generator[None, None, Any], asyncio.Future[Any]]] = deque()
        self._loop = asyncio.get_running_loop()
        # All work begun in one turn shares its time.
        self._until = 0.0
        self._fresh = False
        self._in_turn = False
        self._stepping = False

    def run(self, work: Generator[None, None, R]) -> asyncio.Future[R]:
        """Begin the work; the future has the generator's result. Cancelling the future does not stop the work."""
        result: asyncio.Future[R] = self._loop.create_future()
        self._work.append((work, result))
        if not self._in_turn:
            self._begin_turn()
        self._advance()
        return result

    def _begin_turn(self) -> None:
        self._in_turn = bool(self._work)
        if self._in_turn:
            self._until, self._fresh = time.perf_counter() + self._seconds, True
            self._loop.call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._begin_turn()
        self._advance()

    def _advance(self) -> None:
        """Do steps until the time is used up. Work that is begun by a step waits for its turn."""
        if self._stepping:
            return
        self._stepping = True
        try:
            while self._work and (self._fresh or time.perf_counter() < self._until):
                self._fresh = False
                work, result = self._work[0]
                try:
                    next(work)
                except StopIteration as end:
                    self._work.popleft()
                    if not result.done():
                        result.set_result(end.value)
                except Exception as error:
                    self._work.popleft()
                    if not result.done():
                        result.set_exception(error)
        finally:
            self._stepping = False
