"""Run asynchronous code without an event loop, in threads that can be stopped.

The coroutines of the SDK never suspend on a blocking transport, so a synchronous method runs one to its end in
the calling thread. The synchronous classes are faces of asynchronous ones, written by `scripts/blocking-client`. A
stop signal does for such a thread what cancellation does for a task.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Generator, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, Generic, Self, TypeVar

C_co = TypeVar("C_co", covariant=True)
F = TypeVar("F", bound="Face[Any]")
R = TypeVar("R")


class Face(Generic[C_co]):
    """Base of a synchronous class; its core is the asynchronous object, which has the coroutines."""

    _core: C_co
    _parts: dict[Any, Any]

    @classmethod
    def _of(cls, core: C_co) -> Self:  # type: ignore[misc]
        """Return the face of a core."""
        face = object.__new__(cls)
        face._core, face._parts = core, {}
        return face

    def _part(self, kind: type[F], core: Any) -> F:
        """Return the face of a part of the core, which is the same object each time."""
        return self._parts.setdefault(core, kind._of(core))

    def __repr__(self) -> str:
        return repr(self._core).replace("Async", "", 1)


def finish(coroutine: Coroutine[Any, Any, R]) -> R:
    """Run a coroutine that never suspends and return its result."""
    # An event loop that runs in this thread must not adopt generators: it would close them at its own end.
    hooks = sys.get_asyncgen_hooks()
    sys.set_asyncgen_hooks(None, None)
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: R = done.value
        return result
    finally:
        sys.set_asyncgen_hooks(*hooks)
    coroutine.close()
    raise RuntimeError(f"{coroutine} suspended, where only blocking calls are expected")


def iterate(events: AsyncIterator[R]) -> Generator[R, None, None]:
    """Iterate over an asynchronous generator that never suspends; leaving the iteration closes it."""
    try:
        while True:
            try:
                event = finish(_next(events))
            except StopAsyncIteration:
                return
            yield event
    finally:
        if isinstance(events, AsyncGenerator):
            finish(_close(events))


@contextmanager
def entered(manager: AbstractAsyncContextManager[R, bool | None]) -> Iterator[R]:
    """Enter an asynchronous context manager that never suspends; the exception that leaves this one leaves it."""
    value = finish(_enter(manager))
    try:
        yield value
    except BaseException as error:
        if not finish(_leave(manager, error)):
            raise
    else:
        finish(_leave(manager, None))


async def _enter(manager: AbstractAsyncContextManager[R, bool | None]) -> R:
    return await manager.__aenter__()


async def _leave(
    manager: AbstractAsyncContextManager[Any, bool | None], error: BaseException | None
) -> bool | None:
    traceback = error.__traceback__ if error is not None else None
    return await manager.__aexit__(type(error) if error is not None else None, error, traceback)


async def _next(events: AsyncIterator[R]) -> R:
    return await anext(events)


async def _close(events: AsyncGenerator[Any, None]) -> None:
    await events.aclose()


class StopSignal:
    """Signal that ends the calls and waits registered with it, at present and in the future. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stopped = False
        self._actions: dict[object, Callable[[], object]] = {}

    def stop(self) -> None:
        """Call the registered actions, and every action that is registered later."""
        with self._lock:
            self._stopped = True
            actions = list(self._actions.values())
        for action in actions:
            action()

    @contextmanager
    def on_stop(self, action: Callable[[], object]) -> Iterator[None]:
        """Call `action`, which must be quick, if the signal is given within the block or was given before."""
        token = object()
        with self._lock:
            stopped = self._stopped
            self._actions[token] = action
        try:
            if stopped:
                action()
            yield
        finally:
            with self._lock:
                del self._actions[token]


_current: ContextVar[StopSignal | None] = ContextVar("paceline_stop_signal", default=None)


@contextmanager
def stopped_by(signal: StopSignal) -> Iterator[None]:
    """Run the block under a signal, in addition to the signal that it already ran under."""
    outer = _current.get()
    token = _current.set(signal)
    try:
        if outer is None:
            yield
        else:
            with outer.on_stop(signal.stop):
                yield
    finally:
        _current.reset(token)


def may_be_stopped() -> bool:
    """Return True if this thread runs under a signal."""
    return _current.get() is not None


@contextmanager
def on_stop(action: Callable[[], object]) -> Iterator[None]:
    """Call `action` when the signal that this thread runs under is given. Without one, do nothing."""
    signal = _current.get()
    if signal is None:
        yield
    else:
        with signal.on_stop(action):
            yield
