"""Recommend how many instances each pool should have, and stabilize the recommendations.

The demand of the fleet is plain data; throughput and idleness are averaged over time. Pure.

The wanted capacity is the highest of three:

- queue: while samples wait, all unfinished ones should be done within `queue_seconds`;
- deadlines: all tokens due by a deadline should be done within `deadline_margin` of the time that is left;
- bubbles: the present capacity, less the share that idles within steps beyond `bubble_share`. Between steps nothing
  counts as idle, because instances pre-generate the coming step then.

Capacity is in measured tokens a second. Before the first measurement it is in concurrent samples, and deadlines
are not considered. Earlier pools grow first and shrink last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import ceil, exp, floor, inf

from paceline.internal.v1.demand_pb2 import InstanceDemand
from paceline.v1 import fleet_pb2
from services.policy.config import PoolConfig, ScalingConfig

# Tolerance of a number of replicas, so that rounding errors add no instance.
_FINEST = 1e-9
HALF_FULL = 0.5
"""Share of its capacity that an instance must run for its throughput to be measured."""
RATE_SECONDS, BUBBLE_SECONDS = 60.0, 120.0
"""Time constants of the averages."""


@dataclass(frozen=True, slots=True)
class Due:
    """Tokens to be generated within `seconds` from now, which may be negative."""

    seconds: float
    tokens: float


@dataclass(frozen=True, slots=True)
class Demand:
    """Unfinished samples, the tokens that they are predicted to need, deadlines and instances."""

    waiting_samples: int = 0
    waiting_tokens: float = 0.0
    running_samples: int = 0
    running_tokens: float = 0.0
    dues: tuple[Due, ...] = ()
    instances: tuple[InstanceDemand, ...] = ()

    @property
    def samples(self) -> int:
        """Unfinished samples."""
        return self.waiting_samples + self.running_samples

    @property
    def tokens(self) -> float:
        """Tokens that unfinished samples are predicted to need."""
        return self.waiting_tokens + self.running_tokens


def ordinal(instance_id: str, pool: str) -> int | None:
    """Return the number in an instance's name <pool>-<number>; None if it is not in the pool."""
    name, _, number = instance_id.rpartition("-")
    return int(number) if name == pool and number.isdecimal() else None


class Meter:
    """Exponential averages over successive observations of the demand. Times are in monotonic seconds."""

    def __init__(self) -> None:
        self.bubble_share: float | None = None
        """Share of instance time within steps in which an instance had no sample; None before the first step."""
        self._worked_at: float | None = None
        """Time of the last work, or of the first observation while there was none."""
        self._rates: dict[str, float] = {}
        self._last: dict[str, tuple[InstanceDemand, float]] = {}

    def rate(self, pool: str) -> float | None:
        """Return the tokens a second of a well-filled instance; the mean of all pools if this one has no rate."""
        known = self._rates.get(pool)
        if known is not None or not self._rates:
            return known
        return sum(self._rates.values()) / len(self._rates)

    def idle_for(self, now: float) -> float:
        """Return the seconds since the last work."""
        return 0.0 if self._worked_at is None else max(0.0, now - self._worked_at)

    def observe(self, demand: Demand, pools: Collection[str], now: float) -> None:
        """Update the averages; instances outside the pools do not count."""
        if demand.samples or self._worked_at is None:
            self._worked_at = now
        mine = {each.instance_id: each for each in demand.instances if _pool_of(each, pools) is not None}
        serving = [each for each in mine.values() if each.state == fleet_pb2.INSTANCE_STATE_SERVING]
        if demand.samples and serving:
            share = sum(each.running == 0 for each in serving) / len(serving)
            elapsed = max((now - at for _, at in self._last.values()), default=0.0)
            self.bubble_share = _average(self.bubble_share, share, elapsed, BUBBLE_SECONDS)
        for name, each in mine.items():
            if name in self._last:
                self._observe_rate(str(_pool_of(each, pools)), *self._last[name], each, now)
        self._last = {name: (each, now) for name, each in mine.items()}

    def _observe_rate(
        self, pool: str, before: InstanceDemand, at: float, each: InstanceDemand, now: float
    ) -> None:
        elapsed, tokens = now - at, each.generated_tokens - before.generated_tokens
        if elapsed <= 0 or tokens <= 0 or before.epoch != each.epoch:
            return
        if min(before.running, each.running) >= HALF_FULL * max(1, each.max_running):
            self._rates[pool] = _average(self._rates.get(pool), tokens / elapsed, elapsed, RATE_SECONDS)


def _pool_of(each: InstanceDemand, pools: Collection[str]) -> str | None:
    return next((pool for pool in pools if ordinal(each.instance_id, pool) is not None), None)


def _average(old: float | None, new: float, elapsed: float, constant: float) -> float:
    return new if old is None else old + (1.0 - exp(-elapsed / constant)) * (new - old)


@dataclass(frozen=True, slots=True)
class PoolCapacity:
    """Desired replicas of a pool, and the capacity of one.

    `rate` is in tokens a second (None: unmeasured), `capacity` in concurrent samples.
    """

    replicas: int
    rate: float | None
    capacity: float


@dataclass(frozen=True, slots=True)
class Recommendation:
    """Recommended replicas by pool, in the order of the pools.

    `reason` is queue, deadline, bubbles, enough or idle; `wanted` and `there` are capacities in `unit`.
    """

    replicas: dict[str, int]
    reason: str
    wanted: float = 0.0
    there: float = 0.0
    unit: str = "tokens/s"


def recommend(
    config: ScalingConfig,
    demand: Demand,
    capacities: Sequence[PoolCapacity],
    bubble_share: float | None,
    idle: bool = False,
) -> Recommendation:
    """Return the recommended replicas of each pool.

    Args:
        config: pools and thresholds.
        demand: unfinished samples and deadlines.
        capacities: in the order of `config.pools`.
        bubble_share: share of instance time that bubbles took within steps; None if unknown.
        idle: there has been no work for long.
    """
    if idle:
        return Recommendation({pool.name: pool.minimum for pool in config.pools}, "idle")
    measured = all(each.rate is not None for each in capacities)
    units = [each.rate if measured and each.rate is not None else each.capacity for each in capacities]
    there = sum(each.replicas * unit for each, unit in zip(capacities, units, strict=True))
    reasons = {"enough": there, "queue": 0.0, "deadline": _for_deadlines(config, demand) if measured else 0.0}
    if demand.waiting_samples:
        reasons["queue"] = demand.tokens / config.queue_seconds if measured else float(demand.samples)
    reason = max(reasons, key=lambda name: reasons[name])
    if reason == "enough" and bubble_share is not None and bubble_share > config.bubble_share:
        # Not below what queue and deadlines need.
        busy = there * (1.0 - bubble_share) / (1.0 - config.bubble_share)
        reasons["bubbles"] = max(busy, reasons["queue"], reasons["deadline"])
        reason = "bubbles"
    wanted = reasons[reason]
    replicas = _allocate(config.pools, capacities, units, wanted)
    unit = "tokens/s" if measured else "samples"
    return Recommendation(replicas, reason, wanted, there, unit)


def _for_deadlines(config: ScalingConfig, demand: Demand) -> float:
    """Return the rate at which every deadline is met when the earliest is served first."""
    wanted, tokens = 0.0, 0.0
    for due in sorted(demand.dues, key=lambda due: due.seconds):
        tokens += due.tokens
        if tokens > 0:
            left = due.seconds * config.deadline_margin
            wanted = max(wanted, tokens / left if left > 0 else inf)
    return wanted


def _allocate(
    pools: Sequence[PoolConfig], capacities: Sequence[PoolCapacity], units: Sequence[float], wanted: float
) -> dict[str, int]:
    """Return replicas with the wanted capacity, changing as few of the present ones as possible."""
    replicas = {
        pool.name: max(pool.minimum, min(pool.maximum, each.replicas))
        for pool, each in zip(pools, capacities, strict=True)
    }
    missing = wanted - sum(count * unit for count, unit in zip(replicas.values(), units, strict=True))
    for pool, unit in zip(pools, units, strict=True):
        if missing > 0 and unit > 0:
            room = pool.maximum - replicas[pool.name]
            more = room if missing == inf else min(room, ceil(missing / unit - _FINEST))
            replicas[pool.name] += more
            missing = max(0.0, missing - more * unit)
    for pool, unit in reversed(list(zip(pools, units, strict=True))):
        if missing < 0 and unit > 0:
            room = replicas[pool.name] - pool.minimum
            fewer = min(room, floor(-missing / unit + _FINEST))
            replicas[pool.name] -= fewer
            missing += fewer * unit
            if fewer < room:
                # A smaller instance of another pool might fit, but the next work would reverse that.
                break
    return replicas


class Stabilizer:
    """Replicas of one pool that follow a change only once it has been recommended for a while.

    The pool grows to the fewest replicas recommended throughout a short window, and shrinks to the most recommended
    throughout a longer one. Changes below the tolerance are ignored, and each change starts a cooldown. Times are
    in monotonic seconds.
    """

    def __init__(self, config: ScalingConfig) -> None:
        self._config = config
        self._history: deque[tuple[float, int]] = deque()
        self._began: float | None = None
        self._changed_at = float("-inf")
        self._last: int | None = None
        self._target = 0

    def update(self, current: int, recommended: int, now: float) -> int:
        """Return the wanted replicas, given the currently desired ones and a recommendation.

        A change that is made one replica at a time counts as one change; the cooldown begins when it has ended.
        """
        self._remember(recommended, now)
        self._observe(current, now)
        moving = current != self._target
        if not moving and now - self._changed_at < self._config.cooldown_seconds:
            return current
        wanted = self._stable(current, now)
        if not moving and abs(wanted - current) < self._config.tolerance * current:
            wanted = current
        if moving and wanted == current:
            # Stopping half-way is a change, too.
            self._changed_at = now
        self._target = wanted
        return wanted

    def _remember(self, recommended: int, now: float) -> None:
        self._began = now if self._began is None else self._began
        self._history.append((now, recommended))
        horizon = now - max(self._config.up_seconds, self._config.down_seconds)
        # The last recommendation before the horizon was in force at the horizon.
        while len(self._history) > 1 and self._history[1][0] <= horizon:
            self._history.popleft()

    def _observe(self, current: int, now: float) -> None:
        """Start the cooldown once the replicas have reached the target, or were changed from outside."""
        last, self._last = self._last, current
        if last is None:
            self._target = current
        elif current != last:
            if not min(last, self._target) <= current <= max(last, self._target):
                self._target = current
            if current == self._target:
                self._changed_at = now

    def _stable(self, current: int, now: float) -> int:
        assert self._began is not None
        if now - self._began >= self._config.up_seconds:
            fewest = min(self._within(now - self._config.up_seconds))
            if fewest > current:
                return fewest
        if now - self._began >= self._config.down_seconds:
            return min(current, max(self._within(now - self._config.down_seconds)))
        return current

    def _within(self, since: float) -> list[int]:
        """Return the recommendations since a time, including the one in force then."""
        values = [value for at, value in self._history if at > since]
        before = [value for at, value in self._history if at <= since]
        return [*before[-1:], *values]
