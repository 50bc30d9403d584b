"""Stop blocking work that runs in a thread: what a cancelled task is to an event loop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class StopSignal:
    """Stops whatever waits under it, now and from now on. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stopped = False
        self._actions: dict[object, Callable[[], object]] = {}

    def stop(self) -> None:
        """Call what was registered, and all that will be."""
        with self._lock:
            self._stopped = True
            actions = list(self._actions.values())
        for action in actions:
            action()

    @contextmanager
    def on_stop(self, action: Callable[[], object]) -> Iterator[None]:
        """Call `action`, which must be quick, if the signal stops within the block or has stopped before."""
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
    """Run the block under a signal, and under the one that it ran under before."""
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
    """Call `action` when the signal that this thread runs under stops; nothing where there is none."""
    signal = _current.get()
    if signal is None:
        yield
    else:
        with signal.on_stop(action):
            yield
