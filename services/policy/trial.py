"""Now and then a step is done the other way, plain or with drafts, so that its time is measured. Pure.

A step-time model is corrected by the steps that are done. One that prices verification too high sees none any more,
and one that prices it too low sees no plain step to compare with: both stay wrong. So where the two ways are close,
each is done at least once in so many steps; what that costs is at most the difference, divided by their number.
"""

from __future__ import annotations

from dataclasses import dataclass

_STEPS = 32
BAND = 0.1
"""How far the slower way may be behind, as a share."""


@dataclass(slots=True)
class Trial:
    """Counts steps. `due` is asked what a step that is about to be decided should be instead."""

    # Steps since the last of each kind.
    _plain: int = 0
    _drafted: int = 0

    def due(self, speedup: float, *, drafted: bool) -> bool:
        """Whether a step is to be done the other way.

        Args:
            speedup: predicted, of the best drafts over plain decoding.
            drafted: whether it was going to be done with drafts.
        """
        since = self._plain if drafted else self._drafted
        return since >= _STEPS and 1 - BAND <= speedup <= 1 + BAND

    def stepped(self, *, drafted: bool) -> None:
        """A step was done with drafts or without."""
        self._plain = self._plain + 1 if drafted else 0
        self._drafted = 0 if drafted else self._drafted + 1
