"""How long samples go on, learned from who is still there when an instance is asked again. Pure.

What is kept is a hazard: of the tokens that samples of about this length have got while they were watched, on
how many did one end. Before anything is known it is that of heavy-tailed lengths, of which the rest is
expected to be as long as what there is (a Pareto distribution with an index of two).
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from math import exp, expm1, log

import numpy as np
from numpy.typing import NDArray

# Lengths that differ by this factor are told apart, from the shortest on.
_GRID, _SHORTEST, _BINS = 1.3, 8.0, 48
# Endings that the guess counts for, and those that are remembered for one length.
_GUESS, _MEMORY = 2.0, 64.0


class Lifetimes:
    """Of the samples of one kind. Lengths are response tokens."""

    def __init__(self) -> None:
        self._ended: NDArray[np.float64] = np.zeros(_BINS)
        # Tokens that samples have got at this length.
        self._lived: NDArray[np.float64] = np.zeros(_BINS)
        self._watched: dict[Hashable, dict[Hashable, int]] = {}

    def saw(self, place: Hashable, lengths: Mapping[Hashable, int], left: Collection[Hashable] = ()) -> None:
        """These samples are in one place now, with so many tokens. Of those that were there when it was last looked
        at and are not now, `left` have gone elsewhere; the others have ended."""
        before, self._watched[place] = self._watched.get(place, {}), dict(lengths)
        gained = [lengths[key] - tokens for key, tokens in before.items() if key in lengths]
        if not gained:
            # It cannot be told how far those that ended had come.
            return
        typical = max(1, sorted(gained)[len(gained) // 2])
        for key, tokens in before.items():
            if key in lengths:
                self._live(tokens, lengths[key])
            elif key not in left:
                # Somewhere on the way.
                self._live(tokens, tokens + typical / 2)
                self._end(tokens + typical / 2)

    def remaining(self, generated: int, limit: int) -> float:
        """Tokens that a sample with so many and at most `limit` is expected to go on for; at least one."""
        total, alive, at = 0.0, 1.0, float(generated)
        while at < limit and alive > 1e-3:
            place = _place(at)
            end = min(_edge(place + 1), float(limit)) if place < _BINS - 1 else float(limit)
            hazard = self._hazard(place, at)
            survive = exp(-hazard * (end - at))
            total += alive * (-expm1(-hazard * (end - at)) / hazard)
            alive, at = alive * survive, end
        return max(1.0, min(total, float(limit - generated)))

    def _hazard(self, place: int, at: float) -> float:
        """Endings for each token."""
        length = max(at, _edge(place), 1.0)
        return float((self._ended[place] + _GUESS) / (self._lived[place] + _GUESS * length / 2))

    def _live(self, begin: float, end: float) -> None:
        at = float(begin)
        while at < end:
            place = _place(at)
            stop = min(_edge(place + 1), float(end)) if place < _BINS - 1 else float(end)
            self._lived[place] += stop - at
            at = stop

    def _end(self, at: float) -> None:
        place = _place(at)
        self._ended[place] += 1
        if self._ended[place] > _MEMORY:
            # Policies change: what is old fades.
            self._ended[place] /= 2
            self._lived[place] /= 2


def _place(length: float) -> int:
    return max(0, min(_BINS - 1, int(log(max(length, 1.0) / _SHORTEST) / log(_GRID) + 1 + 1e-9)))


def _edge(place: int) -> float:
    """The shortest length of a place on the grid."""
    return _SHORTEST * _GRID ** (place - 1) if place > 0 else 0.0
