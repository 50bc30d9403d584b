"""Now and then a step is done the other way, plain or with drafts, so that its time is measured. Pure.

A step-time model is corrected by the steps that are done. One that prices verification too high sees none of it,
and one that prices it too low sees no plain step to compare with: both stay wrong. So each way is done now and
then, soon at first, when nothing was measured, and more seldom later; and the more seldom, the further apart the
two are predicted to be, so that what all trials cost by that prediction stays a small share. It is done twice in a
row, because the first step after others takes longer than those that follow it (see `timing`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

# Steps until the first trial, and between later ones, of ways that are this close, as a share.
_FIRST, _STEPS = 8, 64
_CLOSE = 0.1
LEAST, MOST = 0.85, 1.3
"""Predicted speedups of drafts between which trials are made: beyond there is no doubt."""


@dataclass(slots=True)
class _Count:
    """Steps since the last of each kind, and until the next trial."""

    plain: int = 0
    drafted: int = 0
    interval: int = _FIRST


@dataclass(slots=True)
class Trial:
    """Counts steps, those of each octave of batch sizes by themselves: they are corrected by themselves.

    `made` is asked whether a step that is about to be decided is done the other way.
    """

    _counts: dict[int, _Count] = field(default_factory=dict)
    # Of the octave that was asked for last.
    _interval: int = _FIRST
    # How the step was going to be done whose trial has one more step to come.
    _again: bool | None = None

    def made(self, requests: int, speedup: float, *, drafted: bool) -> bool:
        """Whether a step is done the other way; then it counts as a trial.

        Args:
            requests: samples of the step.
            speedup: predicted, of the best drafts over plain decoding.
            drafted: whether it was going to be done with drafts.
        """
        again, self._again = self._again, None
        if not LEAST <= speedup <= MOST:
            return False
        if again is drafted:
            return True
        count = self._count(requests)
        since = count.plain if drafted else count.drafted
        if since < count.interval * max(1.0, abs(speedup - 1) / _CLOSE):
            return False
        count.interval = self._interval = min(2 * count.interval, _STEPS)
        self._again = drafted
        return True

    def stepped(self, requests: int, *, drafted: bool) -> None:
        """A step of so many samples was done with drafts or without."""
        count = self._count(requests)
        count.plain = count.plain + 1 if drafted else 0
        count.drafted = 0 if drafted else count.drafted + 1

    def _count(self, requests: int) -> _Count:
        octave = requests.bit_length()
        count = self._counts.get(octave)
        if count is None:
            # What is known of other sizes holds here, too, more or less.
            count = self._counts[octave] = _Count(interval=self._interval)
        return count
