"""Run asynchronous code without an event loop, in threads that can be stopped.

The coroutines of the SDK never suspend on a blocking transport, so a synchronous method runs one to its end in
the calling thread. The synchronous classes are faces of asynchronous ones: most of their methods are made by
`blocking`, `blocking_stream`, `blocking_face` and `blocking_context`, with the signature and the docstring of the
asynchronous method. A stop signal does for such a thread what cancellation does for a task.
"""

from __future__ import annotations

import inspect
import re
import sys
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Generator, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import update_wrapper
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

C = TypeVar("C")
C_co = TypeVar("C_co", covariant=True)
P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F")


class Face(Generic[C_co]):
    """Base of a synchronous class; its core is the asynchronous object, which has the coroutines."""

    def __init_subclass__(cls) -> None:
        """Name the methods after their class, for tracebacks and documentation."""
        super().__init_subclass__()
        for name, method in vars(cls).items():
            if inspect.isfunction(method):
                method.__module__, method.__qualname__ = cls.__module__, f"{cls.__qualname__}.{name}"

    def __init__(self, core: C_co) -> None:
        self._core = core


def blocking(
    method: Callable[Concatenate[C, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Face[C], P], R]:
    """Return the synchronous face of a coroutine method."""

    def call(self: Face[C], *args: P.args, **kwargs: P.kwargs) -> R:
        return finish(method(self._core, *args, **kwargs))

    return _described(call, method)


def blocking_stream(
    method: Callable[Concatenate[C, P], AsyncIterator[R]],
) -> Callable[Concatenate[Face[C], P], Iterator[R]]:
    """Return the synchronous face of a method that returns an asynchronous generator."""

    def call(self: Face[C], *args: P.args, **kwargs: P.kwargs) -> Iterator[R]:
        return iterate(method(self._core, *args, **kwargs))

    return _described(call, method)


def blocking_face(
    method: Callable[Concatenate[C, P], Coroutine[Any, Any, R]], face: Callable[[R], F]
) -> Callable[Concatenate[Face[C], P], F]:
    """Return the synchronous face of a coroutine method, whose result gets a `face`."""

    def call(self: Face[C], *args: P.args, **kwargs: P.kwargs) -> F:
        return face(finish(method(self._core, *args, **kwargs)))

    return _described(call, method)


def blocking_context(
    method: Callable[Concatenate[C, P], AbstractAsyncContextManager[R, bool | None]], face: Callable[[R], F]
) -> Callable[Concatenate[Face[C], P], AbstractContextManager[F]]:
    """Return the synchronous face of an asynchronous context manager, whose value gets a `face`."""

    def call(self: Face[C], *args: P.args, **kwargs: P.kwargs) -> AbstractContextManager[F]:
        return _entered(method(self._core, *args, **kwargs), face)

    return _described(call, method)


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
def _entered(manager: AbstractAsyncContextManager[R, bool | None], face: Callable[[R], F]) -> Iterator[F]:
    """Enter an asynchronous context manager that never suspends; the exception that leaves this one leaves it."""
    value = finish(_enter(manager))
    try:
        yield face(value)
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


def _described(call: Callable[P, R], method: Callable[..., Any]) -> Callable[P, R]:
    """Give a face the name, docstring and signature of its method, with Iterator for AsyncIterator and so on."""
    update_wrapper(call, method)
    del call.__wrapped__  # type: ignore[attr-defined]
    signature = inspect.signature(method)
    returned = re.sub(r"\bAsync(?=[A-Z])", "", str(signature.return_annotation))
    call.__annotations__ = {**method.__annotations__, "return": returned}
    call.__signature__ = signature.replace(return_annotation=returned)  # type: ignore[attr-defined]
    return call


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
