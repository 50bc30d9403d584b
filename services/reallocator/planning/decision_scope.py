"""Scope of a decision: when it is due, which instances take part, and whose samples are listed. Pure.

A decision is due after a number of engine steps. An instance that gave samples takes none for a while, and the
reverse.

Choose by counts alone the instances whose samples are worth listing. Pure. Listing the samples of an instance
takes its engine time between two steps, and a large fleet has more samples than one process can look at in every
decision. The load of each instance is known anyway. From it follows the most that a pair can gain, before the
cost of moves: the plan's own pairs (see `plan.py`), if samples were all alike.

Choose whose samples are listed for a decision, so that none looks at all samples of a large fleet. Pure. Two
kinds of instances are listed: those in pairs that could gain by their loads (`screening`), the most promising
first and up to a bound; and in one of several decisions some witnesses, by which the lengths of samples are
learned. Lengths follow from two listings of one instance, so the witnesses stay the same. A pair that was listed
and moved nothing, for a reason that loads do not show, makes way for all others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from heapq import nsmallest
from typing import NamedTuple

from services.reallocator.planning.plan import ROUNDING, emptiest_first, fullest_first, halves, rate_gain
from services.reallocator.planning.records import LoadView, ReallocationRules, Rule, Transfer

Name = tuple[str, int]
"""Id of an instance, and its epoch."""


class Trigger:
    """Counter of engine steps since the last decision.

    A decision is due when some instance has made `steps` engine steps, and at once when an instance has joined.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._at: dict[Name, int] = {}
        self._seen: set[Name] = set()

    def is_due(self, steps: Mapping[Name, int], samples: Collection[int]) -> bool:
        """Return whether to decide now, given the steps and samples of the instances that could take part.

        Instances that differ by fewer than two samples cannot be balanced any better.
        """
        if len(samples) < 2 or max(samples) - min(samples) < 2:
            return False
        if not steps.keys() <= self._seen:
            return True
        return any(count - self._at.get(name, 0) >= self._steps for name, count in steps.items())

    def steps_left(self, steps: Mapping[Name, int]) -> int:
        """Return the engine steps until the first of these instances makes a decision due; at least 0."""
        left = [self._steps - (count - self._at.get(name, 0)) for name, count in steps.items()]
        return max(0, min(left, default=0))

    def decided(self, steps: Mapping[Name, int]) -> None:
        """Note that a decision was made at these step counts."""
        self._at = dict(steps)
        self._seen = set(steps)


class Cooldown:
    """Instances that gave or took samples in the last `decisions` decisions."""

    def __init__(self, decisions: int) -> None:
        self._decisions = decisions
        self._now = 0
        self._gave: dict[str, int] = {}
        self._took: dict[str, int] = {}

    def decided(self, transfers: Iterable[Transfer]) -> None:
        """Note the transfers of a decision. Evacuations do not count."""
        self._now += 1
        for transfer in transfers:
            if transfer.rule is not Rule.EVACUATE:
                self._gave[transfer.donor] = self._took[transfer.receiver] = self._now
        oldest = self._now - self._decisions
        self._gave = {name: at for name, at in self._gave.items() if at > oldest}
        self._took = {name: at for name, at in self._took.items() if at > oldest}

    def gives(self, instance_id: str) -> bool:
        """Return whether the instance may give samples."""
        return instance_id not in self._took

    def receives(self, instance_id: str) -> bool:
        """Return whether the instance may take samples."""
        return instance_id not in self._gave


class PromisingPair(NamedTuple):
    """Pair that could gain so much, relatively and before the cost of moves."""

    gain: float
    donor: str
    receiver: str


def worth_listing(
    fleet: Iterable[LoadView], rules: ReallocationRules, most: int, in_vain: Mapping[str, int] | None = None
) -> frozenset[str]:
    """Return the ids of the instances in pairs whose gain could reach the least that their rule asks for.

    Of more than `most`, those in the pairs that could gain most; but a pair of which both were listed `in_vain`, in
    the decisions with these numbers, comes after those that were so earlier or never.
    """
    groups: dict[Hashable, list[LoadView]] = defaultdict(list)
    for load in fleet:
        groups[load.peers].append(load)
    pairs: list[PromisingPair] = []
    for group in groups.values():
        ranked = emptiest_first(group)
        # Both: the plan balances where the threshold rule finds nothing, which loads alone do not tell.
        pairs += _above_threshold(ranked, rules)
        pairs += _uneven(ranked, rules) if rules.balance else ()
    found: set[str] = set()
    for pair in sorted(pairs, key=lambda each: (_tried(each, in_vain or {}), -each.gain, each.donor)):
        wider = found | {pair.donor, pair.receiver}
        if len(wider) <= most:
            found = wider
    return frozenset(found)


def _tried(pair: PromisingPair, in_vain: Mapping[str, int]) -> int:
    return min(in_vain.get(pair.donor, 0), in_vain.get(pair.receiver, 0))


def _above_threshold(ranked: Sequence[LoadView], rules: ReallocationRules) -> Iterator[PromisingPair]:
    """Yield the pairs of the threshold rule that could gain; `ranked` begins with the emptiest."""
    donors = [each for each in fullest_first(ranked) if each.samples > each.threshold]
    receivers = [each for each in ranked if each.samples < each.threshold]
    trust = rules.trust.get(Rule.THRESHOLD, 1.0)
    for donor, receiver in zip(donors, receivers, strict=False):
        most = min(donor.samples - donor.threshold, receiver.threshold - receiver.samples)
        gain = trust * max(rate_gain(donor, receiver, count) for count in halves(most))
        if gain >= rules.least_gain - ROUNDING:
            yield PromisingPair(gain, donor.instance_id, receiver.instance_id)


def _uneven(ranked: Sequence[LoadView], rules: ReallocationRules) -> Iterator[PromisingPair]:
    """Yield the pairs that could finish sooner; `ranked` begins with the emptiest.

    Steps of the donor shorten most at once, while it has most samples. The bound is as if they did until the end.
    """
    trust = rules.trust.get(Rule.BALANCE, 1.0)
    for receiver, donor in zip(ranked[: len(ranked) // 2], reversed(ranked), strict=False):
        moved = (donor.samples - receiver.samples) // 2
        if moved < 1:
            break
        after = donor.curve.step_seconds(donor.samples - moved)
        gain = trust * (donor.curve.step_seconds(donor.samples) / after - 1) if after else 0.0
        if gain >= rules.least_balance_gain - ROUNDING:
            yield PromisingPair(gain, donor.instance_id, receiver.instance_id)


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
