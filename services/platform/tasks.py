"""Wait for tasks, for changes of state, and between attempts.

`end` and its relatives cancel tasks reliably, `Notifier` wakes all tasks that wait for a change, and
`ExponentialBackoff` computes delays; it neither waits nor reads a clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

# Seconds after which a task that has not ended is cancelled again.
_AGAIN_SECONDS = 0.25
# Keeps the power of two finite; the longest delay is reached long before.
_MAX_DOUBLINGS = 64


async def end(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel the tasks until they have ended; their errors stay in them.

    Cancelling once is not enough on Python 3.11: its `asyncio.wait_for`, which the Redis client uses to send, drops
    a cancellation that arrives when the awaited operation has just finished.
    """
    pending = {task for task in tasks if not task.done()}
    interrupted: asyncio.CancelledError | None = None
    while pending:
        for task in pending:
            task.cancel()
        try:
            await asyncio.wait(pending, timeout=_AGAIN_SECONDS)
        except asyncio.CancelledError as error:
            # The caller was cancelled; the tasks must end all the same.
            interrupted = error
        pending = {task for task in pending if not task.done()}
    if interrupted is not None:
        raise interrupted


async def until_one_ends(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Wait until one of the tasks ends by itself, raise its error if it failed, and end the others."""
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        await end(tasks)


async def to_the_end(work: Coroutine[Any, Any, T], running: set[asyncio.Task[Any]]) -> T:
    """Wait for work that continues if the wait is cancelled, for example because the caller of an RPC has left.

    The task is in `running` until it ends, so that its owner can end it.
    """
    task = asyncio.create_task(work)
    running.add(task)
    task.add_done_callback(running.discard)
    return await asyncio.shield(task)


async def uninterrupted(work: Awaitable[T], hasten: Callable[[], object] = lambda: None) -> T:
    """Wait for work that cannot be cancelled, such as a thread's; a cancellation is raised once it has ended.

    A lock around the call is thus held until the work no longer needs it. `hasten` is called when the wait is
    cancelled, to make the work end soon.
    """
    task = asyncio.ensure_future(work)
    interrupted: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            interrupted = error
            hasten()
    if interrupted is not None:
        if not task.cancelled():
            task.exception()  # so that asyncio does not report it as never retrieved
        raise interrupted
    return task.result()


def is_cancelled() -> bool:
    """Return True if this task was cancelled.

    Used by loops over Redis, whose client can drop a cancellation (see `end`), and to distinguish a cancellation of
    the task from a CancelledError of a call whose channel was closed.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class Notifier:
    """A condition without a lock, for tasks of one event loop.

    Usage: check the state; if it is not as desired, `await notifier.wait()` and check again. There must be no await
    between the check and the wait, so that no change is missed.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Wake all waiting tasks."""
        self._event.set()
        self._event = asyncio.Event()

    def next_change(self) -> asyncio.Event:
        """Return the event that the next `notify` sets, for tasks that await between check and wait."""
        return self._event

    async def wait(self) -> None:
        """Wait for the next `notify`."""
        await self._event.wait()


class ExponentialBackoff:
    """Delays of one peer or operation: `first` seconds after a failure, doubling up to `longest` seconds."""

    def __init__(self, first: float, longest: float) -> None:
        self.failures = 0
        """Failures since the last success."""
        self._first = first
        self._longest = longest

    @property
    def delay(self) -> float:
        """Seconds to wait after the failures so far; 0 if there were none."""
        if not self.failures:
            return 0.0
        return min(self._longest, self._first * 2.0 ** min(self.failures - 1, _MAX_DOUBLINGS))

    def failed(self) -> float:
        """Count a failure and return the seconds to wait before the next attempt."""
        self.failures += 1
        return self.delay

    def succeeded(self) -> None:
        """Start over: the next failure costs the first delay again."""
        self.failures = 0
