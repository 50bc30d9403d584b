"""Hold the handler of a gRPC call at one of its waits, so that the call can be cancelled exactly there.

A handler is a coroutine that waits a number of times: for Redis, an instance, a lock. `HeldCalls` counts the waits
of one call, and at the nth lets it wait for ever instead, while all else goes on. When the caller then cancels the
call, what the handler really waited for is cancelled as asyncio does it: a task or future that it awaited as well.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Generator
from typing import Any

import pytest

from services.platform.grpc.interceptor import CallInterceptor


class HeldCall:
    """The next call of a method, which is held at its nth wait."""

    def __init__(self, method: str, nth: int) -> None:
        self.method = method
        self.nth = nth
        self.waits = 0
        self.held = asyncio.Event()
        self.ended = asyncio.Event()


class HeldCalls:
    """Servers whose interceptors are made while this is in place hold the calls that are named by `hold`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._next: HeldCall | None = None
        plain: Callable[..., Any] = CallInterceptor._wrap

        def wrap(interceptor: CallInterceptor, handler: Any, method: str) -> Any:
            (shape,) = [name for name in _SHAPES if getattr(handler, name) is not None]
            behaviour = self._behaviour(getattr(handler, shape), method)
            return plain(interceptor, handler._replace(**{shape: behaviour}), method)

        monkeypatch.setattr(CallInterceptor, "_wrap", wrap)

    def hold(self, method: str, nth: int) -> HeldCall:
        """Hold the next call of a method, by its full name, at its nth wait."""
        self._next = HeldCall(method, nth)
        return self._next

    def _take(self, method: str) -> HeldCall | None:
        if self._next is None or self._next.method != method:
            return None
        taken, self._next = self._next, None
        return taken

    def _behaviour(self, behaviour: Callable[..., Any], method: str) -> Callable[..., Any]:
        async def call(request: Any, context: Any) -> Any:
            held = self._take(method)
            if held is None:
                return await behaviour(request, context)
            try:
                return await _Steps(behaviour(request, context), held)
            finally:
                held.ended.set()

        async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
            held, replies = self._take(method), behaviour(request, context)
            try:
                if held is None:
                    async for reply in replies:
                        yield reply
                    return
                while True:
                    try:
                        reply = await _Steps(anext(replies), held)
                    except StopAsyncIteration:
                        return
                    yield reply
            finally:
                await replies.aclose()
                if held is not None:
                    held.ended.set()

        return stream if inspect.isasyncgenfunction(behaviour) else call


_SHAPES = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


class _Steps:
    """A coroutine whose waits are counted; at the nth it is held until it is cancelled."""

    def __init__(self, coroutine: Any, held: HeldCall) -> None:
        self._coroutine = coroutine
        self._held = held

    def __await__(self) -> Generator[Any, Any, Any]:
        send, given = self._coroutine.send, None
        while True:
            try:
                awaited = send(given)
            except StopIteration as stop:
                return stop.value
            self._held.waits += 1
            try:
                if self._held.waits == self._held.nth:
                    yield from self._hold(awaited)
                else:
                    yield awaited
                send, given = self._coroutine.send, None
            except BaseException as error:
                send, given = self._coroutine.throw, error

    def _hold(self, awaited: Any) -> Generator[Any, Any, None]:
        self._held.held.set()
        try:
            yield from asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            # As Task.cancel does: what is awaited is cancelled, and the task goes on when that has ended.
            if awaited is None or not awaited.cancel():
                raise
        yield awaited
