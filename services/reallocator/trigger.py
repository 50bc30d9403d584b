"""When a decision is due. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

Name = tuple[str, int]
"""An instance and its epoch."""


class Trigger:
    """A decision is due when some instance has made so many engine steps since the last one, and at once when an
    instance has joined."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._at: dict[Name, int] = {}
        self._seen: set[Name] = set()

    def is_due(self, steps: Mapping[Name, int], samples: Collection[int]) -> bool:
        """Whether to decide now, by the engine steps of those that could take part and by their samples. With
        fewer than two samples' difference nothing can be evened out."""
        if len(samples) < 2 or max(samples) - min(samples) < 2:
            return False
        if not steps.keys() <= self._seen:
            return True
        return any(count - self._at.get(name, 0) >= self._steps for name, count in steps.items())

    def steps_left(self, steps: Mapping[Name, int]) -> int:
        """Engine steps until the first of these has made so many; at least 0."""
        left = [self._steps - (count - self._at.get(name, 0)) for name, count in steps.items()]
        return max(0, min(left, default=0))

    def decided(self, steps: Mapping[Name, int]) -> None:
        """A decision was made with these."""
        self._at = dict(steps)
        self._seen = set(steps)
