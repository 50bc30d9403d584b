"""Waiting for tasks, and cancelling them reliably."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

# Time that a task has to end before it is cancelled again.
_AGAIN_SECONDS = 0.25


async def end(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel the tasks until they have ended; what they raise is left in them.

    Once is not enough on Python 3.11: its `asyncio.wait_for`, which the Redis client sends with, drops a
    cancellation that arrives when what it waits for has just finished.
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


def is_cancelled() -> bool:
    """Return True if this task was cancelled.

    For loops that use Redis, whose client can drop a cancellation (see `end`), and to distinguish the cancellation
    of the task from that of a call whose channel was closed.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
