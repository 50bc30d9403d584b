"""How many instances each pool should have. Pure.

The demand becomes a capacity that is wanted, as the highest of three:

- the queue: what is unfinished should be done within `queue_seconds`, if there are samples that wait;
- deadlines: for each, all tokens that are due by then within `deadline_margin` of the time that is left;
- bubbles: the capacity there is, less what stands idle within steps beyond `bubble_share`. Between steps nothing is
  idle in this sense: there instances pre-generate the coming step.

Capacity is in tokens a second as they were measured, and in samples at once before there is a measurement (then
deadlines say nothing). Earlier pools grow first and shrink last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, inf

from services.policy.scaling.demand import Demand

_FINEST = 1e-9


@dataclass(frozen=True, slots=True)
class Pool:
    """Bounds of a pool's replicas."""

    name: str
    minimum: int
    maximum: int


@dataclass(frozen=True, slots=True)
class Rules:
    """As ScalingConfig says."""

    pools: tuple[Pool, ...]
    queue_seconds: float = 120.0
    deadline_margin: float = 0.8
    bubble_share: float = 0.3


@dataclass(frozen=True, slots=True)
class Fleet:
    """A pool as it is: the replicas that it is meant to have, and what each can do: tokens a second (None: not
    measured yet) and samples at once."""

    replicas: int
    rate: float | None
    capacity: float


@dataclass(frozen=True, slots=True)
class Recommendation:
    """`replicas` by pool, in the pools' order; `reason` is queue, deadline, bubbles, enough or idle; `wanted` and
    `there` are capacities in `unit`."""

    replicas: dict[str, int]
    reason: str
    wanted: float = 0.0
    there: float = 0.0
    unit: str = "tokens/s"


def recommend(
    rules: Rules, demand: Demand, fleets: Sequence[Fleet], bubble_share: float | None, idle: bool = False
) -> Recommendation:
    """The replicas of each pool; `fleets` in the order of `rules.pools`.

    Args:
        bubble_share: share of instance time that bubbles took within steps; None: unknown.
        idle: there has been no work for long.
    """
    if idle:
        return Recommendation({pool.name: pool.minimum for pool in rules.pools}, "idle")
    measured = all(fleet.rate is not None for fleet in fleets)
    each = [fleet.rate if measured and fleet.rate is not None else fleet.capacity for fleet in fleets]
    there = sum(fleet.replicas * one for fleet, one in zip(fleets, each, strict=True))
    reasons = {
        "enough": there,
        "queue": _for_queue(rules, demand, measured),
        "deadline": _for_deadlines(rules, demand) if measured else 0.0,
    }
    reason = max(reasons, key=lambda name: reasons[name])
    if reason == "enough" and bubble_share is not None and bubble_share > rules.bubble_share:
        # Not below what queue and deadlines need.
        busy = there * (1.0 - bubble_share) / (1.0 - rules.bubble_share)
        reasons["bubbles"] = max(busy, reasons["queue"], reasons["deadline"])
        reason = "bubbles"
    wanted = reasons[reason]
    replicas = _allocate(rules.pools, fleets, each, wanted)
    unit = "tokens/s" if measured else "samples"
    names = (pool.name for pool in rules.pools)
    return Recommendation(dict(zip(names, replicas, strict=True)), reason, wanted, there, unit)


def _for_queue(rules: Rules, demand: Demand, measured: bool) -> float:
    if not demand.waiting_samples:
        return 0.0
    return demand.tokens / rules.queue_seconds if measured else float(demand.samples)


def _for_deadlines(rules: Rules, demand: Demand) -> float:
    """The rate at which every deadline is met when the earliest is served first."""
    wanted, tokens = 0.0, 0.0
    for due in sorted(demand.dues, key=lambda due: due.seconds):
        tokens += due.tokens
        if tokens > 0:
            left = due.seconds * rules.deadline_margin
            wanted = max(wanted, tokens / left if left > 0 else inf)
    return wanted


def _allocate(
    pools: Sequence[Pool], fleets: Sequence[Fleet], each: Sequence[float], wanted: float
) -> list[int]:
    """The replicas that have the capacity, with as few changes as that takes: earlier pools grow first and shrink
    last."""
    replicas = [
        max(pool.minimum, min(pool.maximum, fleet.replicas))
        for pool, fleet in zip(pools, fleets, strict=True)
    ]
    spare = sum(count * one for count, one in zip(replicas, each, strict=True)) - wanted
    return _shrunk(pools, each, replicas, spare) if spare > 0 else _grown(pools, each, replicas, -spare)


def _grown(pools: Sequence[Pool], each: Sequence[float], replicas: list[int], missing: float) -> list[int]:
    for index, (pool, one) in enumerate(zip(pools, each, strict=True)):
        if missing > 0 and one > 0:
            room = pool.maximum - replicas[index]
            # A hair above a whole number is that number.
            more = room if missing == inf else min(room, ceil(missing / one - _FINEST))
            replicas[index] += more
            missing -= more * one
    return replicas


def _shrunk(pools: Sequence[Pool], each: Sequence[float], replicas: list[int], spare: float) -> list[int]:
    for index in reversed(range(len(pools))):
        if spare > 0 and each[index] > 0:
            room = replicas[index] - pools[index].minimum
            less = min(room, floor(spare / each[index] + _FINEST))
            replicas[index] -= less
            spare -= less * each[index]
            if less < room:
                # Another pool's smaller instance might fit in, but the next bit of work would turn that around.
                break
    return replicas
