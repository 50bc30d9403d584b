"""Notification of all tasks that wait for the next change of some state."""

import asyncio


class Notifier:
    """A condition without a lock, for tasks of one event loop.

    Usage: examine the state; if it is not as desired, `await notifier.wait()` and examine it again. There must be
    no await between examining and waiting, so that no change is missed.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Wake every task that waits."""
        self._event.set()
        self._event = asyncio.Event()

    def next_change(self) -> asyncio.Event:
        """Return the event that the next `notify` sets, for tasks that await between examining and waiting."""
        return self._event

    async def wait(self) -> None:
        """Wait for the next `notify`."""
        await self._event.wait()
