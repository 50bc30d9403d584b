"""Which entries of the feed are done with. Pure.

An entry is held by everything that came out of it: a sample by itself, rewards by each sample that they are of.
It may be acknowledged when all of those are part of a durable state, or were dropped on purpose.
"""

from __future__ import annotations

from collections.abc import Iterable


class Acks:
    """Counts holds; `done` collects what nobody holds any more, until it is taken."""

    def __init__(self) -> None:
        self._holds: dict[str, int] = {}
        self._done: list[str] = []

    @property
    def held(self) -> int:
        """Entries that are held."""
        return len(self._holds)

    def hold(self, entry: str, count: int = 1) -> None:
        """So many things came out of an entry; with none it is done."""
        if count:
            self._holds[entry] = self._holds.get(entry, 0) + count
        elif entry not in self._holds:
            self._done.append(entry)

    def release(self, entries: Iterable[str]) -> None:
        """One thing of each is done with. What is not held is left alone."""
        for entry in entries:
            left = self._holds.get(entry, 0) - 1
            if left > 0:
                self._holds[entry] = left
            elif left == 0:
                del self._holds[entry]
                self._done.append(entry)

    def take(self) -> list[str]:
        """The entries to be acknowledged now."""
        done, self._done = self._done, []
        return done

    def put_back(self, entries: Iterable[str]) -> None:
        """They could not be acknowledged yet."""
        self._done.extend(entries)
