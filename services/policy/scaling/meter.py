"""What instances achieve and how idle they are, from one look at the demand to the next. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from math import exp

from services.policy.scaling.demand import Demand, InstanceDemand, State, ordinal

HALF_FULL = 0.5
"""An instance says something about its throughput while it has this share of the samples that it can run."""
RATE_SECONDS, BUBBLE_SECONDS = 60.0, 120.0
"""Time constants of the averages."""


class Meter:
    """Averages that forget. Times are in seconds, monotonic."""

    def __init__(self) -> None:
        self.bubble_share: float | None = None
        """Share of instance time within steps in which an instance had no sample; None before there was a step."""
        self.worked_at: float | None = None
        """When there was work last; None before there was any."""
        self._rates: dict[str, float] = {}
        self._last: dict[str, tuple[InstanceDemand, float]] = {}
        self._began: float | None = None

    def rate(self, pool: str) -> float | None:
        """Tokens a second of a well-filled instance of the pool; of any pool, where nothing is known of it; None
        where nothing is known at all."""
        known = self._rates.get(pool)
        if known is not None or not self._rates:
            return known
        return sum(self._rates.values()) / len(self._rates)

    def idle_for(self, now: float) -> float:
        """Seconds without any work."""
        since = self.worked_at if self.worked_at is not None else self._began
        return 0.0 if since is None else max(0.0, now - since)

    def observe(self, demand: Demand, pools: Mapping[str, object], now: float) -> None:
        """Takes in a look at the demand. Instances of none of the pools do not count."""
        self._began = now if self._began is None else self._began
        if demand.samples:
            self.worked_at = now
        mine = [each for each in demand.instances if _pool_of(each, pools) is not None]
        self._observe_bubbles(demand, mine, now)
        for each in mine:
            self._observe_rate(each, str(_pool_of(each, pools)), now)
        self._last = {each.instance_id: (each, now) for each in mine}

    def _observe_bubbles(self, demand: Demand, mine: list[InstanceDemand], now: float) -> None:
        serving = [each for each in mine if each.state is State.SERVING]
        if not demand.samples or not serving:
            return
        share = sum(each.running == 0 for each in serving) / len(serving)
        elapsed = max((now - at for _, at in self._last.values()), default=0.0)
        self.bubble_share = _blend(self.bubble_share, share, elapsed, BUBBLE_SECONDS)

    def _observe_rate(self, each: InstanceDemand, pool: str, now: float) -> None:
        known = self._last.get(each.instance_id)
        if known is None:
            return
        before, at = known
        elapsed, tokens = now - at, each.tokens - before.tokens
        if elapsed <= 0 or tokens <= 0 or before.epoch != each.epoch:
            return
        if min(before.running, each.running) >= HALF_FULL * max(1, each.capacity):
            self._rates[pool] = _blend(self._rates.get(pool), tokens / elapsed, elapsed, RATE_SECONDS)


def _pool_of(each: InstanceDemand, pools: Mapping[str, object]) -> str | None:
    return next((pool for pool in pools if ordinal(each.instance_id, pool) is not None), None)


def _blend(old: float | None, new: float, elapsed: float, constant: float) -> float:
    if old is None:
        return new
    weight = 1.0 - exp(-elapsed / constant)
    return old + weight * (new - old)
