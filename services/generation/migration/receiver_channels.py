"""Channels from an instance to those that its samples move to."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import grpc

_MOST_IDLE = 32


class ReceiverChannels:
    """Channels by address. Those without a call are kept for the next, `most_idle` of them that were used last.

    An instance that restarts has another address, so that all that were ever dialled would be ever more.
    """

    def __init__(self, dial: Callable[[str], grpc.aio.Channel], most_idle: int = _MOST_IDLE) -> None:
        self._dial = dial
        self._most_idle = most_idle
        # The one used last is the last.
        self._channels: OrderedDict[str, grpc.aio.Channel] = OrderedDict()
        self._users: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._channels)

    @asynccontextmanager
    async def to(self, address: str) -> AsyncIterator[grpc.aio.Channel]:
        """Return a channel, which stays open in the context. ValueError: the token may not go there."""
        if address not in self._channels:
            self._channels[address] = self._dial(address)
        self._channels.move_to_end(address)
        self._users[address] += 1
        try:
            yield self._channels[address]
        finally:
            self._users[address] -= 1
            if not self._users[address]:
                del self._users[address]
            await self._close_surplus()

    async def close(self) -> None:
        """Close all channels."""
        channels, self._channels = self._channels, OrderedDict()
        async with AsyncExitStack() as stack:
            for channel in channels.values():
                stack.push_async_callback(channel.close)

    async def _close_surplus(self) -> None:
        idle = [address for address in self._channels if address not in self._users]
        surplus = [self._channels.pop(address) for address in idle[: -self._most_idle or None]]
        for channel in surplus:
            await channel.close()
