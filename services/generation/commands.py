"""Functions that other threads hand to the engine's."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

from services.platform.errors import Unavailable

T = TypeVar("T")


class Commands:
    """A queue of functions. Any thread calls `call`; one thread takes and runs what comes, and then closes it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.asked_at = clock()
        """When the command that is running was asked for."""
        self._clock = clock
        self._queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        # What is still in the queue, and what comes, is answered with an error.
        self._closed = False

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Has a function run; its result, or what it raised. Unavailable once the queue is closed."""
        future: Future[T] = Future()
        asked_at = self._clock()

        def command() -> None:
            self.asked_at = asked_at
            # Whoever asked may have gone away meanwhile, and the future with it.
            if not future.set_running_or_notify_cancel():
                return
            try:
                if self._closed:
                    raise Unavailable("the engine of this instance has stopped")
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        self._queue.put(command)
        if self._closed:
            self._answer()
        return future

    def take(self, *, wait: bool) -> Callable[[], None] | None:
        """The next command, to be run. None when there is none; `wait` for one."""
        try:
            return self._queue.get(block=wait)
        except queue.Empty:
            return None

    def close(self) -> None:
        """No command is run from now on."""
        self._closed = True
        self._answer()

    def _answer(self) -> None:
        with suppress(queue.Empty):
            while True:
                self._queue.get_nowait()()
