"""Plan which samples move where, after RLHFSpec (section 6.1). Pure: the service and the simulator share it.

Instances above their threshold (the saturation point) give to instances below theirs: the fullest to the emptiest,
until one side is used up, each instance at most once per decision. A pair moves at most min(donor - its threshold,
its threshold - receiver) samples (equation 6) that fit and pay, short ones with a low acceptance first.

Where this finds nothing, the long tail of a step can still be uneven: no instance is above its threshold, or the
emptier one has just reached it. Such a pair is balanced if it is predicted to finish sooner.

Each sample moves by the cheapest way (`records.cheapest`). The cost of a pair's moves is subtracted from their gain
before anything is decided, so by its own prediction no decision delays anything.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from services.reallocator.planning.records import (
    Candidate,
    InstanceView,
    LoadView,
    Move,
    MoveBy,
    MovePrice,
    ReallocationRules,
    Rule,
    Transfer,
    cheapest,
    lost,
)

Loaded = InstanceView | LoadView
L = TypeVar("L", InstanceView, LoadView)
ROUNDING = 1e-9
"""Tolerance of a gain, since it compares sums over samples, which differ by rounding."""


@dataclass(slots=True)
class Space:
    """Free seats and KV blocks of an instance, and the moves that a plan has given it."""

    instance_id: str
    samples: int
    room: int
    blocks: int
    taken: list[Move]

    @classmethod
    def of(cls, view: InstanceView, rules: ReallocationRules) -> Space:
        """Return the space of an instance, less the share of its free blocks that stays free."""
        blocks = int(view.free_blocks * (1 - rules.spare_blocks))
        return cls(view.instance_id, view.samples, view.room, blocks, [])

    def fits(self, candidate: Candidate) -> bool:
        """Return whether a seat and enough KV blocks are left."""
        # One block more, because the sample keeps growing.
        return self.room > 0 and candidate.blocks + 1 <= self.blocks

    def take(self, candidate: Candidate) -> None:
        """Give a sample's seat and blocks away, for a move with its KV."""
        self.samples += 1
        self.room -= 1
        self.blocks -= candidate.blocks + 1
        self.taken.append(Move(candidate.key, MoveBy.KV, candidate.tokens))


@dataclass(frozen=True, slots=True)
class PricedCandidate:
    """Sample that could move, and the price of its cheapest way."""

    candidate: Candidate
    price: MovePrice

    @property
    def steps(self) -> float:
        """Engine steps until the sample ends."""
        return self.candidate.remaining / (self.candidate.accepted + 1)


def plan(fleet: Iterable[InstanceView], rules: ReallocationRules) -> list[Transfer]:
    """Return the transfers of one decision."""
    groups: dict[Hashable, list[InstanceView]] = defaultdict(list)
    for view in fleet:
        groups[view.peers].append(view)
    transfers: list[Transfer] = []
    for group in groups.values():
        found = _by_threshold(group, rules)
        transfers += found or (_balance(group, rules) if rules.balance else [])
    return transfers


def evacuate(donor: InstanceView, others: Iterable[InstanceView], rules: ReallocationRules) -> list[Transfer]:
    """Plan to empty an instance: the longest sample first, each to the instance with the fewest samples.

    Samples move with their KV, so that none is prefilled again. A sample that fits nowhere is left out; an instance
    may take part in several transfers.
    """
    spaces = [Space.of(each, rules) for each in others if _may_take(each, donor)]
    for candidate in sorted(_movable(donor), key=lambda each: (-each.tokens, each.key)):
        fitting = [space for space in spaces if space.fits(candidate)]
        if fitting:
            min(fitting, key=lambda space: (space.samples, space.instance_id)).take(candidate)
    reason = f"{donor.instance_id} is to become empty"
    return [
        Transfer(donor.instance_id, space.instance_id, tuple(space.taken), Rule.EVACUATE, 0.0, reason)
        for space in spaces
        if space.taken
    ]


def _may_take(receiver: InstanceView, donor: InstanceView) -> bool:
    return receiver.receives and receiver.peers == donor.peers and receiver.instance_id != donor.instance_id


def _movable(donor: InstanceView) -> list[Candidate]:
    return [candidate for candidate in donor.candidates if candidate.movable]


# Pairs -------------------------------------------------------------------------------------------------


def _by_threshold(group: Sequence[InstanceView], rules: ReallocationRules) -> list[Transfer]:
    """Move samples from above the threshold to below it."""
    donors = [each for each in fullest_first(group) if each.gives and each.samples > each.threshold]
    receivers = [each for each in emptiest_first(group) if each.receives and each.samples < each.threshold]
    found = []
    for donor, receiver in zip(donors, receivers, strict=False):
        pair = _Pair(donor, receiver, rules)
        count = min(donor.samples - donor.threshold, receiver.threshold - receiver.samples)
        part, gain = _best(pair.candidates(count), pair.throughput_gain)
        if part and gain >= rules.least_gain and pair.saved_seconds(part) >= rules.least_saved_seconds:
            reason = (
                f"{donor.samples} samples are above the threshold of {donor.threshold}, "
                f"{receiver.samples} below that of {receiver.threshold}"
            )
            found.append(pair.transfer(part, Rule.THRESHOLD, gain, reason))
    return found


def _balance(group: Sequence[InstanceView], rules: ReallocationRules) -> list[Transfer]:
    """Balance the fullest instance with the emptiest, and so on."""
    ranked = emptiest_first(group)
    found = []
    while len(ranked) > 1:
        receiver, donor = ranked.pop(0), ranked.pop()
        count = (donor.samples - receiver.samples) // 2
        if count < 1:
            break
        # The threshold rule would undo this: the donor has too few, the receiver enough.
        against = donor.samples <= donor.threshold and receiver.samples >= receiver.threshold
        if against or not (donor.gives and receiver.receives):
            continue
        pair = _Pair(donor, receiver, rules)
        part, gain = _best(pair.candidates(count), pair.time_gain)
        saves = part and pair.saved_seconds(part) >= rules.least_saved_seconds
        if saves and gain >= rules.least_balance_gain - ROUNDING:
            reason = f"{donor.samples} samples and {receiver.samples}: balanced, the pair finishes sooner"
            found.append(pair.transfer(part, Rule.BALANCE, gain, reason))
    return found


def emptiest_first(group: Iterable[L]) -> list[L]:
    """Return instances in the order in which they receive."""
    return sorted(group, key=lambda each: (each.samples, each.instance_id))


def fullest_first(group: Iterable[L]) -> list[L]:
    """Return instances in the order in which they give by the threshold rule."""
    return sorted(group, key=lambda each: (-each.samples, each.instance_id))


def halves(most: int) -> Iterator[int]:
    """Yield the numbers of moves among which a pair chooses: all, half, a quarter, ..."""
    while most:
        yield most
        most //= 2


def rate_gain(donor: Loaded, receiver: Loaded, count: int) -> float:
    """Return the relative gain in tokens per second of moving `count` samples (RLHFSpec, equation 5)."""
    before = _rate(donor, 0) + _rate(receiver, 0)
    return (_rate(donor, -count) + _rate(receiver, count)) / before - 1 if before else 0.0


def _best(
    chosen: Sequence[PricedCandidate], gain: Callable[[Sequence[PricedCandidate]], float]
) -> tuple[Sequence[PricedCandidate], float]:
    """Return the best prefix of the candidates, among all of them, half, a quarter, ...; and its gain."""
    best: tuple[Sequence[PricedCandidate], float] = ((), float("-inf"))
    for count in halves(len(chosen)):
        found = gain(chosen[:count])
        # Among equal gains, prefer the most samples: rounding must not decide.
        if found > best[1] + ROUNDING:
            best = chosen[:count], found
    return best


@dataclass(frozen=True, slots=True)
class _Pair:
    """Donor and receiver, between which samples could move."""

    donor: InstanceView
    receiver: InstanceView
    rules: ReallocationRules

    def candidates(self, count: int) -> list[PricedCandidate]:
        """Return at most `count` samples that fit and pay: short ones with few accepted draft tokens first."""
        donor, receiver, rules = self.donor, self.receiver, self.rules
        movable = _movable(donor)
        if not movable or not _may_take(receiver, donor):
            return []
        length = sum(each.tokens for each in movable) / len(movable) or 1.0
        tokens = sum(each.accepted + 1 for each in movable) / len(movable)

        def burden(candidate: Candidate) -> tuple[float, str]:
            return candidate.tokens / length + (candidate.accepted + 1) / tokens, candidate.key

        space, samples = Space.of(receiver, rules), receiver.samples + count
        step_saved = donor.curve.step_seconds(donor.samples) - receiver.curve.step_seconds(samples)
        found: list[PricedCandidate] = []
        for candidate in sorted(movable, key=burden):
            if len(found) == count:
                break
            if not space.fits(candidate):
                continue
            price = cheapest(rules.ways, candidate.tokens, receiver.curve, donor.samples, samples)
            priced = PricedCandidate(candidate, price)
            # A sample has to gain enough for its stall.
            if priced.steps * step_saved >= rules.payback * price.stall:
                space.take(candidate)
                found.append(priced)
        return found

    def throughput_gain(self, part: Sequence[PricedCandidate]) -> float:
        """Return the relative gain in tokens per second while the moved samples run, less the moves' cost.

        Both are expressed in tokens and divided by those that the pair would generate in that time without the
        moves.
        """
        before, count = _rate(self.donor, 0) + _rate(self.receiver, 0), len(part)
        there = self.receiver.curve.step_seconds(self.receiver.samples + count)
        lasting = sum(each.steps for each in part) / count * there
        if not before or not lasting:
            return 0.0
        lost_here, lost_there = lost(each.price for each in part)
        own = sum(each.price.stall * (each.candidate.accepted + 1) / there for each in part)
        cost = lost_here * _rate(self.donor, 0) + lost_there * _rate(self.receiver, count) + own
        return self._trusted(Rule.THRESHOLD, rate_gain(self.donor, self.receiver, count)) - cost / (
            before * lasting
        )

    def time_gain(self, part: Sequence[PricedCandidate]) -> float:
        """Return how much sooner the pair finishes, relative to the remaining time after the moves."""
        unmoved, after = self._finish_seconds(part)
        return unmoved / after - 1 if after else 0.0

    def saved_seconds(self, part: Sequence[PricedCandidate]) -> float:
        """Return how many seconds sooner the pair finishes."""
        unmoved, after = self._finish_seconds(part)
        return unmoved - after

    def _finish_seconds(self, part: Sequence[PricedCandidate]) -> tuple[float, float]:
        """Return when the pair finishes without the moves, and with them."""
        here, there = self.donor.curve.finish_seconds, self.receiver.curve.finish_seconds
        moving = {each.candidate.key for each in part}
        staying = [each.remaining for each in self.donor.candidates if each.key not in moving]
        leaving = [each.candidate.remaining for each in part]
        present = [each.remaining for each in self.receiver.candidates]

        # Time at which the later of the two instances finishes: without the moves, with free moves, and with
        # moves at their price.
        unmoved = max(here(staying + leaving), there(present))
        free = max(here(staying), there(present + leaving))
        # A stalled sample finishes later, as if it had more tokens left. Prefill is not part of that: it stalls the
        # receiver's whole batch and counts as time that the receiver loses.
        curve = self.receiver.curve
        tokens_per_second = curve.tokens / curve.step_seconds(self.receiver.samples + len(part))
        delayed = [
            each.candidate.remaining + (each.price.stall - each.price.prefill) * tokens_per_second
            for each in part
        ]
        lost_here, lost_there = lost(each.price for each in part)
        paid = max(here(staying) + lost_here, there(present + delayed) + lost_there)

        return unmoved, unmoved - self._trusted(Rule.BALANCE, unmoved - free) + paid - free

    def transfer(self, part: Sequence[PricedCandidate], rule: Rule, gain: float, reason: str) -> Transfer:
        """Return the transfer of these samples."""
        moves = tuple(
            Move(each.candidate.key, each.price.by, each.candidate.tokens, each.price.prefill)
            for each in part
        )
        donor, receiver = self.donor.instance_id, self.receiver.instance_id
        return Transfer(
            donor, receiver, moves, rule, gain, reason, rate_gain(self.donor, self.receiver, len(part))
        )

    def _trusted(self, rule: Rule, gain: float) -> float:
        """Return a predicted gain, scaled by the trust in its rule; a loss is not scaled."""
        return gain * self.rules.trust.get(rule, 1.0) if gain > 0 else gain


def _rate(view: Loaded, more: int) -> float:
    return view.curve.throughput(view.samples + more)
