"""Measure the cost and the gain of a transfer on its pair of instances, and learn from them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence

from paceline.times import seconds_of
from services.reallocator.members import PolledInstances
from services.reallocator.metrics import ReallocatorMetrics
from services.reallocator.moves import MoveOutcome
from services.reallocator.planning import measured_speed
from services.reallocator.planning.learned_costs import LearnedCosts
from services.reallocator.planning.measured_speed import InstanceReport, Speed
from services.reallocator.planning.records import Transfer

# The gain is measured over this many engine steps after the moves, or this many seconds.
_MEASURE_STEPS, _MEASURE_SECONDS = 32, 3.0
# Length of the interval before the moves that their gain is compared with.
_BEFORE_SECONDS = 1.0


class Review:
    """Review of one transfer by the reports of its two instances; created before its moves begin."""

    def __init__(
        self,
        transfer: Transfer,
        members: PolledInstances,
        learned: LearnedCosts,
        metrics: ReallocatorMetrics,
        poll_seconds: float,
    ) -> None:
        self._transfer = transfer
        self._members = members
        self._learned = learned
        self._metrics = metrics
        self._poll_seconds = poll_seconds
        self._last = self._reports()
        since = time.monotonic() - _BEFORE_SECONDS
        self._earlier = {
            name: measured_speed.settled(member.reports, since)
            for name in self._last
            if (member := members.known.get(name)) is not None
        }
        self._before = self._speed(self._earlier)

    async def conclude(self, outcome: MoveOutcome) -> dict[str, object]:
        """Measure until there is enough, learn, and return details for the decision log."""
        # After a move by prefix the receiver has only begun to prefill.
        await asyncio.sleep(self._poll_seconds)
        told = self._cost(outcome)
        after = None if self._before is None else await self._measure()
        member = self._members.known.get(self._transfer.donor)
        if self._before is None or after is None or member is None:
            return told
        achieved = measured_speed.achieved_gain(self._before, after, outcome.moved, member.roofline.curve())
        rule, predicted = self._transfer.rule, self._transfer.rate_gain
        if achieved is None:
            # The samples ended before anything could be gained.
            self._learned.trust.brought(rule, predicted, 0.0)
            return told
        self._metrics.achieved_gain.labels(rule).observe(achieved)
        self._learned.trust.brought(rule, predicted, achieved)
        return told | {
            "predicted_rate_gain": predicted,
            "achieved_gain": achieved,
            "tokens_per_second": [self._before.tokens_per_second, after.tokens_per_second],
            "step_seconds": [self._before.step_seconds, after.step_seconds],
        }

    def _cost(self, outcome: MoveOutcome) -> dict[str, object]:
        donor, receiver = (self._lost(name) for name in (self._transfer.donor, self._transfer.receiver))
        member = self._members.known.get(self._transfer.donor)
        if member is not None and member.status is not None:
            self._learned.costs.lost(outcome.done, donor, receiver, seconds_of(member.status.load.step_time))
        return {"engine_seconds_lost": [donor, receiver]}

    def _lost(self, name: str) -> float | None:
        """Return the engine time that an instance has lost since the moves began, by its pace before them."""
        member, since = self._members.known.get(name), self._last.get(name)
        if member is None or since is None or not member.reports:
            return None
        earlier = self._earlier.get(name, [])
        now, curve = member.reports[-1], member.roofline.curve()
        if len(earlier) < 2:
            return None
        # Steps take another time with other samples; about half of the steps had them.
        change = curve.step_seconds(now.samples) / curve.step_seconds(since.samples) if since.samples else 1.0
        return measured_speed.lost_seconds(
            since, now, measured_speed.step_seconds(earlier[0], earlier[-1]) * (1 + change) / 2
        )

    async def _measure(self) -> Speed | None:
        """Measure the pair's speed from now on, until there is enough or one of them is idle."""
        last, busy = self._reports(), self._reports()
        until = time.monotonic() + _MEASURE_SECONDS
        while time.monotonic() < until:
            await asyncio.sleep(self._poll_seconds)
            now = self._reports()
            if now.keys() != last.keys():
                return None
            if not all(report.samples for report in now.values()):
                break
            busy = now
            if min((now[name].steps - last[name].steps for name in last), default=0) >= _MEASURE_STEPS:
                break
        return self._speed(
            {
                name: [r for r in member.reports if report.at <= r.at <= busy[name].at]
                for name, report in last.items()
                if (member := self._members.known.get(name)) is not None
            }
        )

    def _reports(self) -> dict[str, InstanceReport]:
        """Return the last report of each instance of the pair."""
        members = (self._members.known.get(name) for name in (self._transfer.donor, self._transfer.receiver))
        return {m.instance_id: m.reports[-1] for m in members if m is not None and m.reports}

    def _speed(self, over: Mapping[str, Sequence[InstanceReport]]) -> Speed | None:
        together, longest = 0.0, 0.0
        samples: list[float] = []
        for name in (self._transfer.donor, self._transfer.receiver):
            reports = over.get(name, ())
            if len(reports) < 2:
                return None
            together += measured_speed.tokens_per_second(reports[0], reports[-1])
            longest = max(longest, measured_speed.step_seconds(reports[0], reports[-1]))
            samples.append(measured_speed.mean_samples(reports))
        return Speed(together, longest, *samples)
