"""Ends tasks for sure."""

import asyncio
from collections.abc import Iterable
from typing import Any

# How long a task has to end before it is cancelled again.
_AGAIN_SECONDS = 0.25


async def end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancels the tasks until they have ended; what they raise is left in them.

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
            # Whoever waits for us is impatient; the tasks must end all the same.
            interrupted = error
        pending = {task for task in pending if not task.done()}
    if interrupted is not None:
        raise interrupted
