"""Choose by counts alone the instances whose samples are worth listing. Pure.

Listing the samples of an instance takes its engine time between two steps, and a large fleet has more samples than
one process can look at in every decision. The load of each instance is known anyway. From it follows the most that
a pair can gain, before the cost of moves: the plan's own pairs (see `plan.py`), if samples were all alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from services.reallocator.planning.plan import ROUNDING, emptiest_first, fullest_first, halves, rate_gain
from services.reallocator.planning.records import LoadView, ReallocationRules, Rule


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
