"""When the drafter is updated (ReSpec, Algorithm 1 and section 5.3.2). Pure.

Every `interval` steps of training, on 1/`interval` of the replay buffer, beside the generation of the next step:
Async-1 is an update after every step, on all of it. Steps that end during an update count for the next one, which
then begins at once; it still takes one share of the buffer, so an update never grows with the delay.
"""

from __future__ import annotations


class Schedule:
    """Counts steps. One update at a time."""

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self.steps = 0
        """Steps that are over, in all."""
        self._since = 0

    def step_over(self) -> None:
        """A step of training is over."""
        self.steps += 1
        self._since += 1

    def is_due(self, rollouts: int) -> bool:
        """Whether an update should begin, with so many rollouts in the buffer."""
        return self._since >= self.interval and rollouts > 0

    def begun(self) -> None:
        """An update has begun."""
        self._since = 0

    def again(self) -> None:
        """What the last update did is lost: another is due."""
        self._since = max(self._since, self.interval)
