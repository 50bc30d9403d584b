"""Which samples move where, after RLHFSpec (section 6.1). Pure: used by the service and by the simulator alike.

Instances above their threshold give to those below theirs: the fullest to the emptiest, until one side is used up,
each instance at most once in a decision. A pair moves at most min(donor - its threshold, its threshold - receiver)
samples (equation 6), short ones of low acceptance first, as far as they fit and pay.

Where that finds nothing, the tail of a step can be uneven all the same: no instance is above its threshold, or the
emptier one has just reached it. Then the pair is levelled out, if it is predicted to be done sooner.

Each sample goes by the way that costs least (see `price.py`), and what a pair's moves cost is taken off what they
gain before anything is decided: by its own account no decision makes anything later.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from services.reallocator.price import Price, cheapest, lost
from services.reallocator.records import Candidate, Move, Rule, Rules, Standing, Transfer
from services.reallocator.space import Space

# Of a gain: times are sums over samples, and equal ones need not come out as the same number.
_ROUNDING = 1e-9


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
    fewest. By KV: nothing of them is lost. What fits nowhere is left out; instances may take part in several
    transfers."""
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
        part, gain = _best(chosen, partial(_throughput_gain, donor, receiver, rules))
        if part and gain >= rules.least_gain and _time_gain(donor, receiver, rules, part) >= 0:
            reason = (
                f"{donor.samples} samples are above the threshold of {donor.threshold}, "
                f"{receiver.samples} below that of {receiver.threshold}"
            )
            found.append(_transfer(donor, receiver, part, Rule.THRESHOLD, gain, reason))
    return found


def _rate_gain(donor: Standing, receiver: Standing, count: int) -> float:
    """Of the pair's tokens a second (equation 5), as a share, when so many samples have moved."""
    before = _rate(donor, 0) + _rate(receiver, 0)
    return (_rate(donor, -count) + _rate(receiver, count)) / before - 1 if before else 0.0


def _rate(standing: Standing, more: int) -> float:
    return standing.curve.throughput(standing.samples + more)


def _throughput_gain(donor: Standing, receiver: Standing, rules: Rules, part: Sequence[Chosen]) -> float:
    """Of the pair's tokens a second, as a share, over the time that the moved samples go on for, less the tokens
    that the moves cost."""
    before, count = _rate(donor, 0) + _rate(receiver, 0), len(part)
    there = receiver.curve.step_seconds(receiver.samples + count)
    lasting = sum(_steps(each.candidate) for each in part) / count * there
    if not before or not lasting:
        return 0.0
    lost_here, lost_there = lost(each.price for each in part)
    own = sum(each.price.stall * (each.candidate.accepted + 1) / there for each in part)
    cost = lost_here * _rate(donor, 0) + lost_there * _rate(receiver, count) + own
    return _trusted(rules, Rule.THRESHOLD, _rate_gain(donor, receiver, count)) - cost / (before * lasting)


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
        part, gain = _best(chosen, partial(_time_gain, donor, receiver, rules))
        if part and gain >= rules.least_level_gain - _ROUNDING:
            reason = (
                f"{donor.samples} samples beside {receiver.samples}: all are done sooner when it is level"
            )
            found.append(_transfer(donor, receiver, part, Rule.LEVEL, gain, reason))
    return found


def _against_thresholds(donor: Standing, receiver: Standing) -> bool:
    """Whether this would take from who has too few and give to who has enough: the other rule would undo it."""
    return donor.samples <= donor.threshold and receiver.samples >= receiver.threshold


def _time_gain(donor: Standing, receiver: Standing, rules: Rules, part: Sequence[Chosen]) -> float:
    """How much sooner the later of the two is done, as a share of the time that is left then."""
    gone = {each.candidate.key for each in part}
    staying = [candidate.remaining for candidate in donor.candidates if candidate.key not in gone]
    leaving = [each.candidate.remaining for each in part]
    there = [candidate.remaining for candidate in receiver.candidates]
    before = max(_done(donor, staying + leaving), _done(receiver, there))
    free = max(_done(donor, staying), _done(receiver, there + leaving))
    # A sample that stands still gets its tokens so much later; what it waits to be read for, all wait for.
    pace = receiver.curve.tokens / receiver.curve.step_seconds(receiver.samples + len(part))
    late = [each.candidate.remaining + (each.price.stall - each.price.reading) * pace for each in part]
    lost_here, lost_there = lost(each.price for each in part)
    paid = max(_done(donor, staying) + lost_here, _done(receiver, there + late) + lost_there)
    after = before - _trusted(rules, Rule.LEVEL, before - free) + paid - free
    return before / after - 1 if after else 0.0


def _done(standing: Standing, remaining: Sequence[float]) -> float:
    return standing.curve.finish_seconds(remaining)


# Both ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Chosen:
    """A sample that could move, and what the cheapest way costs."""

    candidate: Candidate
    price: Price


def _chosen(donor: Standing, receiver: Standing, count: int, rules: Rules) -> list[Chosen]:
    """At most `count` samples to move: short ones with few accepted tokens first, those that fit and pay."""
    movable = _movable(donor)
    if not movable or not _may_take(receiver, donor):
        return []
    length = sum(each.tokens for each in movable) / len(movable) or 1.0
    tokens = sum(each.accepted + 1 for each in movable) / len(movable)

    def burden(candidate: Candidate) -> tuple[float, str]:
        return candidate.tokens / length + (candidate.accepted + 1) / tokens, candidate.key

    space, samples = Space.of(receiver, rules), receiver.samples + count
    found: list[Chosen] = []
    for candidate in sorted(movable, key=burden):
        if len(found) == count:
            break
        if not space.fits(candidate):
            continue
        price = cheapest(rules.ways, candidate.tokens, receiver.curve, donor.samples, samples)
        if _pays(candidate, price, donor, receiver.curve.step_seconds(samples), rules):
            space.take(candidate)
            found.append(Chosen(candidate, price))
    return found


def _pays(candidate: Candidate, price: Price, donor: Standing, there: float, rules: Rules) -> bool:
    """Whether a sample saves what its move costs it until it is done; steps take `there` seconds then."""
    saved = _steps(candidate) * (donor.curve.step_seconds(donor.samples) - there)
    return saved >= rules.payback * price.stall


def _steps(candidate: Candidate) -> float:
    """Engine steps that a sample goes on for."""
    return candidate.remaining / (candidate.accepted + 1)


def _best(
    chosen: Sequence[Chosen], gain: Callable[[Sequence[Chosen]], float]
) -> tuple[Sequence[Chosen], float]:
    """All, or as many of the first that gain most: half of them, a quarter, ..."""
    best: tuple[Sequence[Chosen], float] = ((), float("-inf"))
    count = len(chosen)
    while count:
        found = gain(chosen[:count])
        if found > best[1]:
            best = chosen[:count], found
        count //= 2
    return best


def _trusted(rules: Rules, rule: Rule, gain: float) -> float:
    """What of a predicted gain is believed; a loss is."""
    return gain * rules.trust.get(rule, 1.0) if gain > 0 else gain


def _transfer(
    donor: Standing, receiver: Standing, part: Sequence[Chosen], rule: Rule, gain: float, reason: str
) -> Transfer:
    moves = tuple(
        Move(each.candidate.key, each.price.by, each.candidate.tokens, each.price.reading) for each in part
    )
    rate_gain = _rate_gain(donor, receiver, len(part))
    return Transfer(donor.instance_id, receiver.instance_id, moves, rule, gain, reason, rate_gain)


def _emptiest_first(group: Iterable[Standing]) -> list[Standing]:
    return sorted(group, key=lambda each: (each.samples, each.instance_id))


def _fullest_first(group: Iterable[Standing]) -> list[Standing]:
    return sorted(group, key=lambda each: (-each.samples, each.instance_id))
