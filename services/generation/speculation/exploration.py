"""Explore other ways of decoding now and then, so that their step times stay measured. Pure.

The estimator learns from the steps that are done. If it overestimates verification, it never sees a drafted step
that would prove it wrong; if it underestimates it, it never sees a plain step to compare with, and beside the best
number of draft tokens it never sees another. So other ways are done now and then: soon at first, more seldom
later, and the more seldom the further apart their predicted rates are, so that the predicted cost of exploration
stays a small share. The first drafts in a batch of a new size wait until a plain step was done: nothing tells what
drafts are worth before that. And where none were verified after eight plain steps, some are once, whatever is
predicted of them: what the sweep says of long contexts may be off by any factor, because its own are short.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from math import inf

# Steps until the first exploration and between later ones, for rates within this share of each other.
_FIRST_INTERVAL, _MAX_INTERVAL = 8, 64
_CLOSE = 0.1
# Plain steps after which the first drafts in a batch of a new size are explored.
_UNTRIED = 8
# Predicted speedups between which plain and drafted steps are explored: beyond them nothing is in doubt.
_MIN_SPEEDUP, _MAX_SPEEDUP = 0.85, 1.3
# Share of the draft tokens that an exploration of fewer verifies.
_FEWER = 0.5


@dataclass(slots=True)
class _Count:
    """Steps since the last plain one, the last drafted one, and the last with fewer tokens; and their intervals."""

    interval: int = _FIRST_INTERVAL
    plain: float = inf
    drafted: int = 0
    tried: bool = False
    fewer: int = 0
    fewer_interval: int = _FIRST_INTERVAL


@dataclass(slots=True)
class Exploration:
    """Schedule of explorations, by octave of batch sizes."""

    _counts: defaultdict[int, _Count] = field(default_factory=lambda: defaultdict(_Count))

    def should_explore(self, num_samples: int, speedup: float, *, drafted: bool) -> bool:
        """Return True if the step should be done the other way; it then counts as an exploration.

        Args:
            num_samples: samples of the step.
            speedup: predicted rate of the best drafts over that of plain decoding.
            drafted: the decision without exploration: True for drafts.
        """
        count = self._counts[num_samples.bit_length()]
        since = count.plain if drafted else count.drafted
        if since == inf:
            return True
        if not drafted and not count.tried:
            return since >= _UNTRIED
        doubtful = _MIN_SPEEDUP <= speedup <= _MAX_SPEEDUP
        if not doubtful or since < count.interval * max(1.0, abs(speedup - 1) / _CLOSE):
            return False
        count.interval = min(2 * count.interval, _MAX_INTERVAL)
        return True

    def fewer(self, num_samples: int, tokens: int) -> int:
        """Return how many of `tokens` draft tokens a step should verify at most: all, or now and then half."""
        count = self._counts[num_samples.bit_length()]
        if count.fewer < count.fewer_interval:
            return tokens
        count.fewer, count.fewer_interval = 0, min(2 * count.fewer_interval, _MAX_INTERVAL)
        return max(1, int(_FEWER * tokens))

    def record_step(self, num_samples: int, *, drafted: bool) -> None:
        """Count a step that was done with or without drafts."""
        count = self._counts[num_samples.bit_length()]
        count.plain = count.plain + 1 if drafted else 0
        count.drafted = 0 if drafted else count.drafted + 1
        count.fewer += drafted
        count.tried |= drafted
