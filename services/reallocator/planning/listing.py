"""Choose whose samples are listed for a decision, so that none looks at all samples of a large fleet. Pure.

Two kinds of instances are listed: those in pairs that could gain by their loads (`screening`), the most promising
first and no more than so many; and in one of several decisions some witnesses, by which the lengths of samples
are learned. Lengths follow from two listings of one instance, so the witnesses stay the same. A pair that was
listed and moved nothing, for a reason that loads do not tell, makes way for all others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from heapq import nsmallest

from services.reallocator.planning.records import LoadView, ReallocationRules, Transfer
from services.reallocator.planning.screening import worth_listing

MOST_LISTED = 64
"""Instances that are listed for their pairs: with 256 samples each, about a quarter of a second of the process."""
WITNESSES = 8
"""Instances of a kind whose samples are listed to learn from."""
# Decisions in one of which the witnesses are listed.
_WITNESSED = 8


class ListingChoice:
    """Choice of a reallocator, decision after decision."""

    def __init__(self) -> None:
        self._decision = 0
        # Of instances that were listed and took part in no transfer, the number of that decision, from 1 on.
        self._in_vain: dict[str, int] = {}
        self._chosen: frozenset[str] = frozenset()

    def choose(self, fleet: Sequence[LoadView], rules: ReallocationRules) -> frozenset[str]:
        """Return the ids of the instances to list for the decision that is due now."""
        names = {load.instance_id for load in fleet}
        self._in_vain = {name: number for name, number in self._in_vain.items() if name in names}
        self._chosen = worth_listing(fleet, rules, MOST_LISTED, self._in_vain)
        return self._chosen if self._decision % _WITNESSED else self._chosen | _witnesses(fleet)

    def decided(self, transfers: Iterable[Transfer]) -> None:
        """Note what came of the instances that were chosen last. Without it the same decision is still due."""
        self._decision += 1
        moving = {name for transfer in transfers for name in (transfer.donor, transfer.receiver)}
        self._in_vain |= dict.fromkeys(self._chosen, self._decision)
        for name in moving:
            self._in_vain.pop(name, None)


def _witnesses(fleet: Iterable[LoadView]) -> frozenset[str]:
    """Return the first instances of each kind, by their names."""
    kinds: dict[Hashable, list[str]] = defaultdict(list)
    for load in fleet:
        kinds[load.peers].append(load.instance_id)
    return frozenset(name for names in kinds.values() for name in nsmallest(WITNESSES, names))
