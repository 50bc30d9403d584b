"""Choose by counts alone the instances whose samples are worth listing. Pure.

Listing the samples of an instance takes its engine time between two steps, and a large fleet has more samples than
one process can look at in every decision. The load of each instance is known anyway. From it follows the most that
a pair can gain, before the cost of moves: the plan's own pairs (see `plan.py`), if samples were all alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence

from services.reallocator.planning.plan import ROUNDING, emptiest_first, fullest_first, halves, rate_gain
from services.reallocator.planning.records import LoadView, ReallocationRules, Rule


def worth_listing(fleet: Iterable[LoadView], rules: ReallocationRules) -> frozenset[str]:
    """Return the ids of the instances in pairs whose gain could reach the least that their rule asks for."""
    groups: dict[Hashable, list[LoadView]] = defaultdict(list)
    for load in fleet:
        groups[load.peers].append(load)
    found: set[str] = set()
    for group in groups.values():
        ranked = emptiest_first(group)
        # Both: the plan balances where the threshold rule finds nothing, which loads alone do not tell.
        found |= _above_threshold(ranked, rules)
        found |= _uneven(ranked, rules) if rules.balance else set()
    return frozenset(found)


def _above_threshold(ranked: Sequence[LoadView], rules: ReallocationRules) -> set[str]:
    """Return the pairs of the threshold rule that could gain; `ranked` begins with the emptiest."""
    donors = [each for each in fullest_first(ranked) if each.samples > each.threshold]
    receivers = [each for each in ranked if each.samples < each.threshold]
    trust, found = rules.trust.get(Rule.THRESHOLD, 1.0), set[str]()
    for donor, receiver in zip(donors, receivers, strict=False):
        most = min(donor.samples - donor.threshold, receiver.threshold - receiver.samples)
        most_gain = max(rate_gain(donor, receiver, count) for count in halves(most))
        if trust * most_gain >= rules.least_gain - ROUNDING:
            found |= {donor.instance_id, receiver.instance_id}
    return found


def _uneven(ranked: Sequence[LoadView], rules: ReallocationRules) -> set[str]:
    """Return the pairs that could finish sooner; `ranked` begins with the emptiest.

    Steps of the donor shorten most at once, while it has most samples. The bound is as if they did until the end.
    """
    trust, found = rules.trust.get(Rule.BALANCE, 1.0), set[str]()
    for receiver, donor in zip(ranked[: len(ranked) // 2], reversed(ranked), strict=False):
        moved = (donor.samples - receiver.samples) // 2
        if moved < 1:
            break
        after = donor.curve.step_seconds(donor.samples - moved)
        gain = donor.curve.step_seconds(donor.samples) / after - 1 if after else 0.0
        if trust * gain >= rules.least_balance_gain - ROUNDING:
            found |= {donor.instance_id, receiver.instance_id}
    return found
