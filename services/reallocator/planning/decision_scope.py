"""Decide when a decision is due, which instances may take part, and whose samples are listed for its views. Pure.

Listing the samples of an instance takes engine time between two steps, and a large fleet has more samples than one
process can look at in every decision. The load of each instance is known anyway. It bounds what a pair can gain
before the cost of moves, as if all samples were alike: `worth_listing` finds the pairs that the plan could pick.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from heapq import nsmallest
from typing import NamedTuple, TypeVar

from paceline.internal.v1 import migration_pb2 as pb
from services.reallocator.planning.learned_costs import RemainingLengthEstimator
from services.reallocator.planning.plan import ROUNDING, emptiest_first, fullest_first, halves, rate_gain
from services.reallocator.planning.records import (
    Candidate,
    InstanceView,
    LoadView,
    ReallocationRules,
    Rule,
    Transfer,
)
from services.reallocator.planning.throughput import Roofline

MOST_LISTED = 64
"""Most instances listed for their pairs, or to receive in an evacuation: with 256 samples each, about a quarter of
a second of the process."""
WITNESSES = 8
"""Instances of each kind that are listed in some decisions to learn the lengths of samples."""
# The witnesses are listed in one of this many decisions.
_WITNESS_INTERVAL = 8

Name = tuple[str, int]
"""Id of an instance, and its epoch."""
T = TypeVar("T")


class DecisionScope:
    """Scope of a reallocator's next decision, given its earlier ones.

    A decision is due when some instance has made `steps` engine steps, and at once when an instance has joined. In
    the `cooldown` decisions after a transfer, its receiver gives no samples and its donor takes none.
    """

    def __init__(self, steps: int, cooldown: int) -> None:
        self._steps = steps
        self._cooldown = cooldown
        self._decisions = 0
        # Engine steps of each instance at the last decision.
        self._steps_then: dict[Name, int] = {}
        # Number of the decision, from 1 on, in which an instance gave or took samples last.
        self._gave: dict[str, int] = {}
        self._took: dict[str, int] = {}
        # The same for instances that were listed and then took part in no transfer.
        self._in_vain: dict[str, int] = {}
        self._listed: frozenset[str] = frozenset()

    def is_due(self, steps: Mapping[Name, int], samples: Collection[int]) -> bool:
        """Return True if a decision is due, given the steps and samples of the instances that could take part.

        Instances that differ by fewer than two samples cannot be balanced any better.
        """
        if len(samples) < 2 or max(samples) - min(samples) < 2:
            return False
        if not steps.keys() <= self._steps_then.keys():
            return True
        return any(count - self._steps_then.get(name, 0) >= self._steps for name, count in steps.items())

    def steps_left(self, steps: Mapping[Name, int]) -> int:
        """Return the engine steps until the first of these instances makes a decision due; at least 0."""
        left = [self._steps - (count - self._steps_then.get(name, 0)) for name, count in steps.items()]
        return max(0, min(left, default=0))

    def choose(self, fleet: Sequence[LoadView], rules: ReallocationRules) -> frozenset[str]:
        """Return the ids of the instances to list for the decision that is due now.

        These are the instances of the most promising pairs, and in some decisions the witnesses. Lengths are
        learned from two listings of one instance, so the witnesses stay the same. A pair that was listed and moved
        nothing, for a reason that loads do not show, yields to all other pairs.
        """
        names = {load.instance_id for load in fleet}
        self._in_vain = {name: number for name, number in self._in_vain.items() if name in names}
        self._listed = worth_listing(fleet, rules, MOST_LISTED, self._in_vain)
        return self._listed if self._decisions % _WITNESS_INTERVAL else self._listed | _witnesses(fleet)

    def gives(self, instance_id: str) -> bool:
        """Return True if the cooldown lets the instance give samples."""
        return instance_id not in self._took

    def receives(self, instance_id: str) -> bool:
        """Return True if the cooldown lets the instance take samples."""
        return instance_id not in self._gave

    def decided(self, steps: Mapping[Name, int], transfers: Iterable[Transfer]) -> None:
        """Record a decision made at these step counts; until then the same decision stays due.

        Evacuations start no cooldown.
        """
        self._decisions += 1
        self._steps_then = dict(steps)
        self._in_vain |= dict.fromkeys(self._listed, self._decisions)
        for transfer in transfers:
            self._in_vain.pop(transfer.donor, None)
            self._in_vain.pop(transfer.receiver, None)
            if transfer.rule is not Rule.EVACUATE:
                self._gave[transfer.donor] = self._took[transfer.receiver] = self._decisions
        oldest = self._decisions - self._cooldown
        self._gave = {name: number for name, number in self._gave.items() if number > oldest}
        self._took = {name: number for name, number in self._took.items() if number > oldest}


def _witnesses(fleet: Iterable[LoadView]) -> frozenset[str]:
    """Return the first instances of each kind, by their names."""
    kinds: dict[Hashable, list[str]] = defaultdict(list)
    for load in fleet:
        kinds[load.peers].append(load.instance_id)
    return frozenset(name for names in kinds.values() for name in nsmallest(WITNESSES, names))


def in_turn(ranked: Sequence[T], most: int, turn: int) -> Sequence[T]:
    """Return at most `most` of the ranked: at turn 0 the first, at each further turn the next, and round again."""
    if len(ranked) <= most:
        return ranked
    first = turn * most % len(ranked)
    return [*ranked[first:], *ranked[:first]][:most]


class PromisingPair(NamedTuple):
    """Pair of instances, and a bound on its relative gain before the cost of moves."""

    gain: float
    donor: str
    receiver: str


def worth_listing(
    fleet: Iterable[LoadView], rules: ReallocationRules, most: int, in_vain: Mapping[str, int] | None = None
) -> frozenset[str]:
    """Return at most `most` instances, by id, from pairs whose gain could reach the least that their rule requires.

    Pairs that could gain most come first. `in_vain` has the number of the decision for which an instance was listed
    without a transfer. A pair with such numbers for both instances comes after pairs with lower numbers or none.
    """
    groups: dict[Hashable, list[LoadView]] = defaultdict(list)
    for load in fleet:
        groups[load.peers].append(load)
    pairs: list[PromisingPair] = []
    for group in groups.values():
        ranked = emptiest_first(group)
        # By both rules: the plan balances where the threshold rule finds nothing, which loads alone do not show.
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

    The donor's steps shorten most right after the moves, while it has most samples. The bound assumes that gain
    until the end.
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


def mean_length(listed: pb.ListSamplesResponse) -> float:
    """Return the mean tokens of a sample, prompt included; 1 without samples."""
    lengths = [each.prompt_tokens + each.response_tokens for each in listed.samples]
    return sum(lengths) / len(lengths) if lengths else 1.0


def instance_view(
    instance_id: str,
    model: str,
    listed: pb.ListSamplesResponse,
    roofline: Roofline,
    remaining_lengths: RemainingLengthEstimator,
    *,
    gives: bool,
    receives: bool,
) -> InstanceView:
    """Return the view of an instance. Instances of one model and policy version are peers."""
    curve = roofline.curve()
    samples = len(listed.samples)
    return InstanceView(
        instance_id=instance_id,
        samples=samples,
        room=max(0, min(listed.free_capacity, listed.max_running - samples)),
        free_blocks=listed.free_blocks,
        curve=curve,
        threshold=roofline.threshold(curve),
        candidates=tuple(_candidate(each, remaining_lengths) for each in listed.samples),
        peers=(model, listed.policy_version),
        gives=gives,
        receives=receives,
    )


def _candidate(listed: pb.ListedSample, remaining_lengths: RemainingLengthEstimator) -> Candidate:
    return Candidate(
        key=listed.key,
        tokens=listed.prompt_tokens + listed.response_tokens,
        accepted=listed.acceptance,
        remaining=remaining_lengths.remaining(listed.response_tokens, listed.max_tokens),
        blocks=listed.kv_blocks,
        movable=listed.immovable == pb.MOVE_REASON_UNSPECIFIED,
    )
