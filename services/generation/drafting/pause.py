"""In which steps drafters are asked: not in every one, while what they offer is not worth the asking. Pure.

To ask and to plan takes time in which the engine waits, about as much of a plain step of a small model as
speculation may cost it at all; no step-time model knows of it. So a step in which drafters were asked is worth the
time that its drafts are predicted to save, in units of what the asking took. Credit is kept of that: drafters that
are worth it on the whole are always asked, others soon only now and then.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

# Most credit, in steps: so many may bring nothing before any is left out. A sample by itself often has a few such
# steps between two good drafts.
_PATIENCE = 8.0
# Most steps that are left out in a row.
_MOST = 32
# With so much credit below nothing, that many are.
_LEAST = -6.0
# Another batch, to which what did not pay may pay: smaller by so much.
_SHRUNK = 0.5


@dataclass(slots=True)
class Pause:
    """Counts steps. `over` begins each, `asked` says what came of one in which drafters were asked."""

    _credit: float = _PATIENCE
    _left: int = 0
    _samples: int = 0

    def over(self, samples: int) -> bool:
        """Whether drafters are asked in the coming step, of so many samples."""
        if self._left and samples >= _SHRUNK * self._samples:
            self._left -= 1
            return False
        return True

    def asked(self, samples: int, saved: float, cost: float = 0.0) -> None:
        """Drafters were asked for a step of so many samples.

        Args:
            samples: of the step.
            saved: seconds that its drafts are predicted to save; 0 where nothing is drafted, infinite where nobody
                says.
            cost: seconds that it took to ask and to plan.
        """
        worth = 0.0 if saved <= 0.0 else saved / cost if cost > 0.0 else inf
        # What pays now is not held to what did not before.
        before = max(self._credit, 0.0) if worth >= 1.0 else self._credit
        self._credit = max(min(before - 1.0 + worth, _PATIENCE), _LEAST)
        self._left = 0 if self._credit >= 0.0 else min(_MOST, round(2 ** (-self._credit - 1.0)))
        self._samples = samples

    def end(self) -> None:
        """Something is known that was not: drafters are asked again, with patience."""
        self._credit, self._left = _PATIENCE, 0

    def interrupt(self) -> None:
        """A sample has come to which what did not pay may pay: drafters are asked in the coming step."""
        self._left = 0
