"""In which steps drafters are asked: not in every one, while nothing that they offer pays. Pure.

To ask costs time, about as much of a plain step of a small model as speculation may cost it at all. A drafter that
never pays is therefore soon asked only now and then; one that pays now and then is asked always.
"""

from __future__ import annotations

from dataclasses import dataclass

# Steps in a row in which nothing was drafted, before any is left out. A sample by itself often has a few such
# steps between two good drafts.
_PATIENCE = 8
# Most steps that are left out in a row.
_MOST = 8
# Another batch, to which what did not pay may pay: smaller by a quarter.
_SHRUNK = 0.75


@dataclass(slots=True)
class Pause:
    """Counts steps. `over` begins each, `asked` says what came of one in which drafters were asked."""

    _declined: int = 0
    _left: int = 0
    _samples: int = 0

    def over(self, samples: int) -> bool:
        """Whether drafters are asked in the coming step, of so many samples."""
        if self._left and samples >= _SHRUNK * self._samples:
            self._left -= 1
            return False
        return True

    def asked(self, samples: int, drafted: bool) -> None:
        """Drafters were asked for a step of so many samples, and anything, or nothing, was drafted."""
        self._declined = 0 if drafted else self._declined + 1
        beyond = self._declined - _PATIENCE
        self._left = 0 if beyond <= 0 else min(_MOST, 1 << min(beyond - 1, _MOST))
        self._samples = samples

    def end(self) -> None:
        """Something is known that was not: drafters are asked again."""
        self._declined = self._left = 0
