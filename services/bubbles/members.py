"""Instances that share the tasks, counted as they are heard of. Pure: times are passed in (unix seconds)."""

from __future__ import annotations

from collections.abc import Set


class SharingMembers:
    """Instances that were heard of in the last `seconds`, and those that the registry has. Each count is O(1)."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        # When each was heard of, the longest silent first.
        self._heard: dict[str, float] = {}
        self._alive: Set[str] = frozenset()
        # Of those alive, the ones that are not in `_heard`.
        self._others = 0

    def hear(self, instance_id: str, now: float) -> None:
        """Take in a sign of life."""
        known = self._heard.pop(instance_id, None) is not None
        self._others -= not known and instance_id in self._alive
        self._heard[instance_id] = now

    def forget(self, instance_id: str) -> None:
        """Count an instance no more, unless it is alive."""
        if self._heard.pop(instance_id, None) is not None:
            self._others += instance_id in self._alive

    def set_alive(self, alive: Set[str]) -> None:
        """Set the instances that the registry has."""
        self._alive = frozenset(alive)
        self._others = len(self._alive - self._heard.keys())

    def count(self, now: float) -> int:
        """Return the number of instances, one at least."""
        while self._heard:
            name, heard = next(iter(self._heard.items()))
            if now - heard <= self._seconds:
                break
            self.forget(name)
        return max(1, len(self._heard) + self._others)
