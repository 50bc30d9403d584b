"""Bounded queue of items on their way to another service."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Outbox(Generic[Item]):
    """Queue of at most `most_bytes` bytes, above which the oldest items are dropped.

    `size_of` returns the bytes of an item; `dropped` is called with the number of items that were dropped.
    """

    def __init__(
        self, most_bytes: int, size_of: Callable[[Item], int], dropped: Callable[[int], object]
    ) -> None:
        self._most_bytes = most_bytes
        self._size_of = size_of
        self._dropped = dropped
        self._items: deque[Item] = deque()
        self.nbytes = 0
        """Bytes of all items."""
        self._wake = asyncio.Event()

    def put(self, item: Item) -> None:
        """Append an item."""
        self._items.append(item)
        self.nbytes += self._size_of(item)
        self._drop_surplus()
        self._wake.set()

    def put_back(self, items: Sequence[Item]) -> None:
        """Put items that were taken back to the front of the queue."""
        self._items.extendleft(reversed(items))
        self.nbytes += sum(map(self._size_of, items))
        self._drop_surplus()
        self._wake.set()

    async def wait(self) -> None:
        """Wait until there is an item."""
        while not self._items:
            self._wake.clear()
            await self._wake.wait()

    def take(self, most_bytes: int) -> list[Item]:
        """Take the oldest items, of at most `most_bytes` bytes but at least one item."""
        taken = [self._items.popleft()]
        size = self._size_of(taken[0])
        while self._items and size + self._size_of(self._items[0]) <= most_bytes:
            taken.append(self._items.popleft())
            size += self._size_of(taken[-1])
        self.nbytes -= size
        return taken

    def _drop_surplus(self) -> None:
        dropped = 0
        while self.nbytes > self._most_bytes:
            self.nbytes -= self._size_of(self._items.popleft())
            dropped += 1
        if dropped:
            self._dropped(dropped)
