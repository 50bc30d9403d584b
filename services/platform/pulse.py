"""Wakes everybody who waits for the next change of something."""

import asyncio


class Pulse:
    """Usage: look at the state; if it is not what you want, `await pulse.wait()` and look again. There must
    be no await between the look and the wait, so that no change is missed."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def beat(self) -> None:
        """Something has changed."""
        self._event.set()
        self._event = asyncio.Event()

    def mark(self) -> asyncio.Event:
        """Set by the next beat after now: for who must look away between looking and waiting."""
        return self._event

    async def wait(self) -> None:
        """Returns at the next beat."""
        await self._event.wait()
