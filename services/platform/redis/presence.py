"""Tell processes that died from those whose records expired because Redis took no heartbeats. Pure.

A record expires when its heartbeats stop: the process has died, or Redis was away, refused writes, hung, or lost
what it had. After each such disturbance a missing record says nothing until every live process has had the time to
write it again. Without one it counts at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar

R = TypeVar("R")


class Presence(Generic[R]):
    """Records of the processes that live, by id, as far as readings of the registry tell.

    Time is passed in, in seconds of one clock. Missing records count again `settling` after the last disturbance.
    Readings that are more than `longest_gap` apart are one: Redis, or this process, may have hung between them.
    """

    def __init__(self, longest_gap: float, settling: float) -> None:
        self._longest_gap = longest_gap
        self._settling = settling
        self._records: dict[str, R] = {}
        self._read_at: float | None = None
        self._settled_at = float("-inf")

    def disturbed(self, now: float) -> None:
        """Record that Redis failed, refused a write or lost what it had."""
        self._settled_at = now + self._settling

    def read(self, records: Mapping[str, R], now: float) -> dict[str, R]:
        """Take in the records that were read; return those of all processes that are not known to be gone."""
        if self._read_at is not None and now - self._read_at > self._longest_gap:
            self.disturbed(now)
        self._read_at = now
        kept = self._records if now < self._settled_at else {}
        self._records = {**kept, **records}
        return dict(self._records)
