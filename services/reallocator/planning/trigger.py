"""Tell when a decision is due. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

Name = tuple[str, int]
"""Id of an instance, and its epoch."""


class Trigger:
    """Counter of engine steps since the last decision.

    A decision is due when some instance has made `steps` engine steps, and at once when an instance has joined.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._at: dict[Name, int] = {}
        self._seen: set[Name] = set()

    def is_due(self, steps: Mapping[Name, int], samples: Collection[int]) -> bool:
        """Return whether to decide now, given the steps and samples of the instances that could take part.

        Instances that differ by fewer than two samples cannot be balanced any better.
        """
        if len(samples) < 2 or max(samples) - min(samples) < 2:
            return False
        if not steps.keys() <= self._seen:
            return True
        return any(count - self._at.get(name, 0) >= self._steps for name, count in steps.items())

    def steps_left(self, steps: Mapping[Name, int]) -> int:
        """Return the engine steps until the first of these instances makes a decision due; at least 0."""
        left = [self._steps - (count - self._at.get(name, 0)) for name, count in steps.items()]
        return max(0, min(left, default=0))

    def decided(self, steps: Mapping[Name, int]) -> None:
        """Note that a decision was made at these step counts."""
        self._at = dict(steps)
        self._seen = set(steps)
