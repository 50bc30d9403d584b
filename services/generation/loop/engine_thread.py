"""Base of the engine loop: a thread that builds an engine, then alternates commands and engine steps."""

from __future__ import annotations

import asyncio
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import structlog

from services.contracts.errors import Unavailable
from services.generation.loop.sample_drafts import SampleDrafts

if TYPE_CHECKING:
    from services.generation.engine.core import Engine

T = TypeVar("T")
_log = structlog.get_logger(__name__)


class WorkKind(StrEnum):
    """Kind of work of the engine thread. A command may take longer than a step: it may load weights."""

    STEP = "step"
    COMMAND = "command"


class EngineWork(NamedTuple):
    """Work that the engine thread is doing, and the time at which it began."""

    kind: WorkKind
    since: float


class EngineThread(threading.Thread, ABC):
    """Base class of the engine loop: the thread, its commands, and its end.

    `factory` builds the engine and its drafts in this thread; `ready` resolves with the engine, or with the
    exception that building raised. `broken` resolves when a step or a command that called `fail` raised; the
    process should exit then.
    """

    def __init__(self, factory: Callable[[], tuple[Any, SampleDrafts]], clock: Callable[[], float]) -> None:
        super().__init__(name="engine", daemon=True)
        self.ready: Future[Any] = Future()
        self.broken: Future[BaseException] = Future()
        # None while the thread waits for commands. Read by the watchdog, which ends a process that hangs.
        self.work: EngineWork | None = None
        self._factory = factory
        self._clock = clock
        # Commands are put by any thread and run by the engine thread.
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        # True once commands are answered with an error, queued ones and later ones.
        self._closed = False
        # Time at which the command that is running was queued.
        self._called_at = clock()
        self._failure: BaseException | None = None
        self._stopping = False

    # -- from any thread ----------------------------------------------------------------------------------

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run a function in the engine thread, between two steps. Unavailable when the thread has ended."""
        future: Future[T] = Future()
        called_at = self._clock()

        def command() -> None:
            self._called_at = called_at
            # The caller may have left meanwhile and cancelled the future.
            if not future.set_running_or_notify_cancel():
                return
            try:
                if self._closed:
                    raise Unavailable("the engine of this instance has stopped")
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        self._commands.put(command)
        if self._closed:
            self._reject()
        return future

    async def execute(self, function: Callable[[], T]) -> T:
        """Run a function as `call` does, and await its result."""
        return await asyncio.wrap_future(self.call(function))

    def fail(self, error: BaseException) -> None:
        """Give the engine up after the command that calls this, as if a step had raised."""
        self._failure = error

    def stop(self) -> Future[None]:
        """End the thread after the queued commands."""

        def end() -> None:
            self._stopping = True
            self._end_streams(None)

        return self.call(end)

    @property
    def asleep(self) -> bool:
        """True while the engine sleeps."""
        return self._has_engine and self._engine.asleep

    @property
    def _has_engine(self) -> bool:
        return self.ready.done() and not self.ready.exception()

    # -- in the engine thread -----------------------------------------------------------------------------

    def run(self) -> None:
        """Build the engine, then step it until stopped or broken."""
        try:
            self._serve()
        finally:
            self._closed = True
            self._reject()

    def _serve(self) -> None:
        try:
            engine, self.drafts = self._factory()
        except BaseException as error:
            self.ready.set_exception(error)
            return
        self._engine: Engine = engine
        self.ready.set_result(engine)
        try:
            while not self._stopping:
                self._turn()
        except BaseException as error:
            self._break(error)

    def _break(self, error: BaseException) -> None:
        try:
            self._end_streams(error)
        finally:
            self._stopping = True
            # After the streams have ended, because a traceback can take a second, and before the process ends.
            _log.error("engine_broken", error=repr(error), exc_info=error)
            self.broken.set_result(error)

    def _run_commands(self, *, wait: bool) -> None:
        while not self._stopping:
            self.work = None
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                return
            wait = False
            self._begin(WorkKind.COMMAND)
            command()
            if self._failure is not None:
                raise self._failure

    def _begin(self, kind: WorkKind) -> None:
        """Record that the thread begins work that may hang."""
        self.work = EngineWork(kind, self._clock())

    def _reject(self) -> None:
        """Answer the queued commands with an error, because the thread has ended."""
        with suppress(queue.Empty):
            while True:
                self._commands.get_nowait()()

    @abstractmethod
    def _turn(self) -> None:
        """Run the waiting commands, then one engine step if there is work."""

    @abstractmethod
    def _end_streams(self, error: BaseException | None) -> None:
        """Send the pending events and end every stream, because the loop was stopped or broke with an error."""
