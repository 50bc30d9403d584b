"""Which samples move where, after RLHFSpec (section 6.1). Pure: used by the service and by the simulator alike.

Instances above their threshold give to those below theirs: the fullest to the emptiest, until one side is used up,
each instance at most once in a decision. A pair moves min(donor - its threshold, its threshold - receiver) samples
(equation 6), short ones of low acceptance first, as far as they fit and pay.

Where that finds nothing, the tail of a step can be uneven all the same: no instance is above its threshold, or the
emptier one has just reached it. Then the pair is levelled out, if it is predicted to be done sooner.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from services.reallocator.records import Candidate, Rule, Rules, Standing, Transfer


def plan(fleet: Iterable[Standing], rules: Rules) -> list[Transfer]:
    """One decision."""
    groups: dict[Hashable, list[Standing]] = defaultdict(list)
    for standing in fleet:
        groups[standing.peers].append(standing)
    transfers: list[Transfer] = []
    for group in groups.values():
        found = _by_threshold(group, rules)
        transfers += found or (_levelled(group, rules) if rules.level else [])
    return transfers


def evacuate(donor: Standing, others: Iterable[Standing], rules: Rules) -> list[Transfer]:
    """Where the samples of an instance go that is to become empty: the longest first, each to the instance with the
    fewest. What fits nowhere is left out; instances may take part in several transfers."""
    spaces = [_Space.of(each, rules) for each in others if _may_take(each, donor)]
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


@dataclass(slots=True)
class _Space:
    """What an instance can still take."""

    instance_id: str
    samples: int
    room: int
    blocks: int
    taken: list[str]

    @classmethod
    def of(cls, standing: Standing, rules: Rules) -> _Space:
        blocks = int(standing.free_blocks * (1 - rules.spare_blocks))
        return cls(standing.instance_id, standing.samples, standing.room, blocks, [])

    def fits(self, candidate: Candidate) -> bool:
        # One block more: the sample goes on growing.
        return self.room > 0 and candidate.blocks + 1 <= self.blocks

    def take(self, candidate: Candidate) -> None:
        self.samples += 1
        self.room -= 1
        self.blocks -= candidate.blocks + 1
        self.taken.append(candidate.key)


def _may_take(receiver: Standing, donor: Standing) -> bool:
    return receiver.receives and receiver.peers == donor.peers and receiver.instance_id != donor.instance_id


def _movable(donor: Standing) -> list[Candidate]:
    return [candidate for candidate in donor.candidates if candidate.movable]


# Above and below the threshold --------------------------------------------------------------------------


def _by_threshold(group: Sequence[Standing], rules: Rules) -> list[Transfer]:
    donors = _fullest_first(each for each in group if each.gives and each.samples > each.threshold)
    receivers = _emptiest_first(each for each in group if each.receives and each.samples < each.threshold)
    found = []
    for donor, receiver in zip(donors, receivers, strict=False):
        count = min(donor.samples - donor.threshold, receiver.threshold - receiver.samples)
        chosen = _chosen(donor, receiver, count, rules)
        gain = _throughput_gain(donor, receiver, len(chosen))
        if chosen and gain >= rules.least_gain:
            reason = (
                f"{donor.samples} samples are above the threshold of {donor.threshold}, "
                f"{receiver.samples} below that of {receiver.threshold}"
            )
            found.append(_transfer(donor, receiver, chosen, Rule.THRESHOLD, gain, reason))
    return found


def _throughput_gain(donor: Standing, receiver: Standing, count: int) -> float:
    """Of the pair's tokens a second (equation 5), as a share."""
    before = donor.curve.throughput(donor.samples) + receiver.curve.throughput(receiver.samples)
    after = donor.curve.throughput(donor.samples - count) + receiver.curve.throughput(
        receiver.samples + count
    )
    return after / before - 1 if before else 0.0


# Level --------------------------------------------------------------------------------------------------


def _levelled(group: Sequence[Standing], rules: Rules) -> list[Transfer]:
    ranked = _emptiest_first(group)
    found = []
    while len(ranked) > 1:
        receiver, donor = ranked.pop(0), ranked.pop()
        count = (donor.samples - receiver.samples) // 2
        if count < 1:
            break
        if not (donor.gives and receiver.receives) or _against_thresholds(donor, receiver):
            continue
        chosen = _chosen(donor, receiver, count, rules)
        gain = _time_gain(donor, receiver, chosen)
        if chosen and gain >= rules.least_level_gain:
            reason = (
                f"{donor.samples} samples beside {receiver.samples}: all are done sooner when it is level"
            )
            found.append(_transfer(donor, receiver, chosen, Rule.LEVEL, gain, reason))
    return found


def _against_thresholds(donor: Standing, receiver: Standing) -> bool:
    """Whether this would take from who has too few and give to who has enough: the other rule would undo it."""
    return donor.samples <= donor.threshold and receiver.samples >= receiver.threshold


def _time_gain(donor: Standing, receiver: Standing, chosen: Sequence[Candidate]) -> float:
    """How much sooner the later of the two is done, as a share of the time that is left then."""
    gone = {candidate.key for candidate in chosen}
    staying = [candidate.remaining for candidate in donor.candidates if candidate.key not in gone]
    leaving = [candidate.remaining for candidate in chosen]
    there = [candidate.remaining for candidate in receiver.candidates]
    before = max(donor.curve.finish_seconds(staying + leaving), receiver.curve.finish_seconds(there))
    after = max(donor.curve.finish_seconds(staying), receiver.curve.finish_seconds(there + leaving))
    return before / after - 1 if after else 0.0


# Both ---------------------------------------------------------------------------------------------------


def _chosen(donor: Standing, receiver: Standing, count: int, rules: Rules) -> list[Candidate]:
    """At most `count` samples to move: short ones with few accepted tokens first, those that fit and pay."""
    movable = _movable(donor)
    if not movable or not _may_take(receiver, donor):
        return []
    length = sum(each.tokens for each in movable) / len(movable) or 1.0
    tokens = sum(each.accepted + 1 for each in movable) / len(movable)

    def burden(candidate: Candidate) -> tuple[float, str]:
        return candidate.tokens / length + (candidate.accepted + 1) / tokens, candidate.key

    space = _Space.of(receiver, rules)
    found: list[Candidate] = []
    for candidate in sorted(movable, key=burden):
        if len(found) == count:
            break
        if space.fits(candidate) and _pays(candidate, donor, receiver, count, rules):
            space.take(candidate)
            found.append(candidate)
    return found


def _pays(candidate: Candidate, donor: Standing, receiver: Standing, count: int, rules: Rules) -> bool:
    """Whether a sample saves more time until it is done than its move costs it."""
    there = receiver.curve.step_seconds(receiver.samples + count)
    steps = candidate.remaining / (candidate.accepted + 1)
    saved = steps * (donor.curve.step_seconds(donor.samples) - there)
    cost = rules.stall_steps * there + rules.seconds_per_token * candidate.tokens
    return saved > rules.payback * cost


def _transfer(
    donor: Standing, receiver: Standing, chosen: Sequence[Candidate], rule: Rule, gain: float, reason: str
) -> Transfer:
    keys = tuple(candidate.key for candidate in chosen)
    return Transfer(donor.instance_id, receiver.instance_id, keys, rule, gain, reason)


def _emptiest_first(group: Iterable[Standing]) -> list[Standing]:
    return sorted(group, key=lambda each: (each.samples, each.instance_id))


def _fullest_first(group: Iterable[Standing]) -> list[Standing]:
    return sorted(group, key=lambda each: (-each.samples, each.instance_id))


class Rest:
    """Keeps instances from giving what they have just taken, and the other way round. Counts decisions."""

    def __init__(self, decisions: int) -> None:
        self._decisions = decisions
        self._now = 0
        self._gave: dict[str, int] = {}
        self._took: dict[str, int] = {}

    def decided(self, transfers: Iterable[Transfer]) -> None:
        """A decision was made. Evacuation is not held against anybody."""
        self._now += 1
        for transfer in transfers:
            if transfer.rule is not Rule.EVACUATE:
                self._gave[transfer.donor] = self._took[transfer.receiver] = self._now
        oldest = self._now - self._decisions
        self._gave = {name: at for name, at in self._gave.items() if at > oldest}
        self._took = {name: at for name, at in self._took.items() if at > oldest}

    def gives(self, instance_id: str) -> bool:
        """Whether the instance may give."""
        return instance_id not in self._took

    def receives(self, instance_id: str) -> bool:
        """Whether the instance may take."""
        return instance_id not in self._gave
