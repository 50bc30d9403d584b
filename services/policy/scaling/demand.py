"""Demand of the fleet as plain data, and averages of throughput and idleness over time. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import exp

from paceline.internal.v1.demand_pb2 import InstanceDemand
from paceline.v1 import fleet_pb2

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
    """Return the number of an instance in a pool, whose instances are called <pool>-<number>; None if not of it."""
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
        """Return tokens a second of a well-filled instance; the mean of all pools where the pool's is unknown."""
        known = self._rates.get(pool)
        if known is not None or not self._rates:
            return known
        return sum(self._rates.values()) / len(self._rates)

    def idle_for(self, now: float) -> float:
        """Return the seconds since there was work last."""
        return 0.0 if self._worked_at is None else max(0.0, now - self._worked_at)

    def observe(self, demand: Demand, pools: Collection[str], now: float) -> None:
        """Update the averages; instances that belong to none of the pools do not count."""
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
