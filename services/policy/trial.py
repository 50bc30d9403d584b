"""Now and then a step is done the other way, plain or with drafts, so that its time is measured. Pure.

A step-time model is corrected by the steps that are done. One that prices verification too high sees none of it,
and one that prices it too low sees no plain step to compare with: both stay wrong. So each way is done now and
then, soon at first, when nothing was measured, and more seldom later; and the more seldom, the further apart the
two are predicted to be, so that what all trials cost by that prediction stays a small share.
"""

from __future__ import annotations

from dataclasses import dataclass

# Steps until the first trial, and between later ones, of ways that are this close, as a share.
_FIRST, _STEPS = 8, 64
_CLOSE = 0.1
LEAST, MOST = 0.85, 1.3
"""Predicted speedups of drafts between which trials are made: beyond there is no doubt."""


@dataclass(slots=True)
class Trial:
    """Counts steps. `made` is asked whether a step that is about to be decided is done the other way."""

    # Steps since the last of each kind.
    _plain: int = 0
    _drafted: int = 0
    _interval: int = _FIRST

    def made(self, speedup: float, *, drafted: bool) -> bool:
        """Whether a step is done the other way; then it counts as a trial.

        Args:
            speedup: predicted, of the best drafts over plain decoding.
            drafted: whether it was going to be done with drafts.
        """
        if not LEAST <= speedup <= MOST:
            return False
        since = self._plain if drafted else self._drafted
        if since < self._interval * max(1.0, abs(speedup - 1) / _CLOSE):
            return False
        self._interval = min(2 * self._interval, _STEPS)
        return True

    def stepped(self, *, drafted: bool) -> None:
        """A step was done with drafts or without."""
        self._plain = self._plain + 1 if drafted else 0
        self._drafted = 0 if drafted else self._drafted + 1
