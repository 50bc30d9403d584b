"""Which seconds of training are hidden. Pure: durations are passed in.

Nobody ever waits for the learner, so what can be measured is whether something else was under way. A second of
training is *hidden* if an instance had samples meanwhile or weights were being updated, or if it lies in a gap
between two steps, when the trainer was busy (seen only when the next step begins, at most `gap` seconds later). All
other seconds are not hidden: those after the last step of a run, above all. What training takes from generation on
cores that both use is not in this; it shows in the rollout's own time.
"""

from __future__ import annotations


class Overlap:
    """Sums up seconds of training."""

    def __init__(self, gap: float) -> None:
        self.hidden = 0.0
        self.not_hidden = 0.0
        self._gap = gap
        self._idle = 0.0
        self._undecided = 0.0

    def note(self, seconds: float, *, training: bool, busy: bool) -> None:
        """So much time has passed, training or not, with something else under way or not."""
        if busy:
            self.hidden += self._undecided + (seconds if training else 0.0)
            self._undecided = self._idle = 0.0
            return
        self._idle += seconds
        if training:
            self._undecided += seconds
        if self._idle > self._gap:
            self.not_hidden += self._undecided
            self._undecided = 0.0

    @property
    def share(self) -> float:
        """Of hidden seconds among those that are decided; 1 while there are none."""
        total = self.hidden + self.not_hidden
        return self.hidden / total if total else 1.0
