"""Watches the instances, decides every so many engine steps, has samples moved, and tells what came of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import structlog

from paceline.v1 import fleet_pb2
from services.gateway.tasks import end
from services.platform.decisions import Decision, DecisionLog
from services.platform.registry import InstanceRecord, Registry
from services.reallocator.config import ReallocatorConfig
from services.reallocator.evacuation import Evacuation
from services.reallocator.measured import steady, step_seconds, tokens_per_second
from services.reallocator.members import Member, Members
from services.reallocator.metrics import ReallocatorMetrics
from services.reallocator.moves import Mover, Outcome
from services.reallocator.plan import Rest, plan
from services.reallocator.records import Rule, Rules, Standing, Transfer
from services.reallocator.standing import mean_length, standing
from services.reallocator.threshold import Roofline
from services.reallocator.trigger import Name, Trigger

log = structlog.get_logger(__name__)

KIND, OUTCOME = "migration", "migration_outcome"
"""Kinds of decisions: what is to be moved, and what then became of it."""
# The gain is measured over so many engine steps after the moves, or as long as this.
_MEASURE_STEPS, _MEASURE_SECONDS = 32, 3.0
# Engine steps with the same samples whose mean time is believed, and how far back a speed "before" reaches.
_LEARN_STEPS, _BEFORE_SECONDS = 16, 1.0


@dataclass(frozen=True, slots=True)
class Speed:
    """A pair of instances: tokens a second together, and the longer of their engine steps."""

    tokens_per_second: float
    step_seconds: float


class Reallocator:
    """Usage: `run` until cancelled. What is being moved then is finished by the instances themselves."""

    def __init__(
        self,
        config: ReallocatorConfig,
        registry: Registry,
        decisions: DecisionLog,
        metrics: ReallocatorMetrics,
        roofline: Callable[[InstanceRecord], Roofline],
    ) -> None:
        self.members = Members(config, registry, roofline)
        self._config = config
        self._decisions = decisions
        self._metrics = metrics
        self._mover = Mover(config, self.members, metrics)
        self._evacuation = Evacuation(
            self.members, self._mover, self._rules, self._look, self._tell_evacuation
        )
        self._trigger = Trigger(config.decision_steps)
        self._rest = Rest(config.rest)
        # Instances that take part in a transfer now.
        self._busy: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Works until cancelled."""
        task = asyncio.current_task()
        try:
            # A cancellation that lands inside a Redis command can get lost, hence the question.
            while task is not None and not task.cancelling():
                await self.members.refresh()
                self._learn()
                self._evacuation.watch()
                self._metrics.evacuating.set(len(self._evacuation.tasks))
                await self._decide_if_due()
                await asyncio.sleep(self._config.poll_seconds)
        finally:
            try:
                await end((*self._tasks, *self._evacuation.tasks.values()))
            finally:
                await self.members.close()

    # Looking -------------------------------------------------------------------------------------------

    def _learn(self) -> None:
        for member in self.members.known.values():
            self._metrics.samples.labels(member.instance_id).set(member.samples)
            now = steady(member.reports, member.learned_at)
            if now is not None and now.steps >= _LEARN_STEPS:
                member.roofline.observe(now.samples, now.step_seconds, now.tokens_per_step, member.context)
                member.learned_at = member.reports[-1].at

    async def _look(self, members: Sequence[Member]) -> list[Standing]:
        """How those that answer stand."""
        listed = await asyncio.gather(*(member.list_samples() for member in members))
        now, found = time.monotonic(), []
        for member, answer in zip(members, listed, strict=True):
            if answer is None:
                continue
            member.context = mean_length(answer)
            shunned = self._mover.shunned.is_shunned(member.instance_id, now)
            found.append(
                standing(
                    member.instance_id,
                    member.record.model,
                    answer,
                    member.roofline,
                    gives=self._rest.gives(member.instance_id),
                    receives=self._rest.receives(member.instance_id) and not shunned,
                )
            )
            self._metrics.threshold.labels(member.instance_id).set(found[-1].threshold)
        return found

    def _rules(self) -> Rules:
        """With what moves have been found to cost."""
        cost = self._mover.cost
        return replace(
            self._config.rules(), stall_steps=cost.stall_steps, seconds_per_token=cost.seconds_per_token
        )

    # Deciding ------------------------------------------------------------------------------------------

    async def _decide_if_due(self) -> None:
        serving = [m for m in self.members.known.values() if m.is_in(fleet_pb2.INSTANCE_STATE_SERVING)]
        steps: dict[Name, int] = {
            (m.instance_id, m.record.epoch): m.reports[-1].steps for m in serving if m.reports
        }
        if not self._trigger.is_due(steps, [member.samples for member in serving]):
            return
        with self._metrics.decision_seconds.time():
            free = [member for member in serving if member.instance_id not in self._busy]
            fleet = await self._look(free)
            transfers = plan(fleet, self._rules())
        self._trigger.decided(steps)
        self._rest.decided(transfers)
        self._metrics.decisions.labels("move" if transfers else "keep").inc()
        tokens = {(each.instance_id, c.key): c.tokens for each in fleet for c in each.candidates}
        for transfer in transfers:
            self._busy |= {transfer.donor, transfer.receiver}
            lengths = {key: tokens[transfer.donor, key] for key in transfer.keys}
            task = asyncio.create_task(self._carry_out(transfer, lengths))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _carry_out(self, transfer: Transfer, tokens: dict[str, int]) -> None:
        log.info(
            "moving",
            donor=transfer.donor,
            receiver=transfer.receiver,
            samples=len(transfer.keys),
            rule=transfer.rule.value,
            predicted_gain=round(transfer.predicted_gain, 3),
            reason=transfer.reason,
        )
        self._metrics.predicted_gain.labels(transfer.rule).observe(transfer.predicted_gain)
        before = self._speed(transfer)
        try:
            decision = Decision(KIND, transfer.reason, transfer.predicted_gain, _details(transfer))
            # Redis may be away: the moves do not wait for it.
            _, outcome = await asyncio.gather(
                self._decisions.write(decision), self._mover.carry_out(transfer, tokens)
            )
        finally:
            self._busy -= {transfer.donor, transfer.receiver}
        details = _details(transfer) | _what_became(outcome)
        if outcome.moved and before is not None and (after := await self._measure(transfer)) is not None:
            achieved = _achieved(transfer.rule, before, after)
            self._metrics.achieved_gain.labels(transfer.rule).observe(achieved)
            details |= {
                "achieved_gain": achieved,
                "tokens_per_second": [before.tokens_per_second, after.tokens_per_second],
                "step_seconds": [before.step_seconds, after.step_seconds],
            }
        reason = f"{outcome.moved} of {len(transfer.keys)} samples were moved"
        await self._decisions.write(Decision(OUTCOME, reason, transfer.predicted_gain, details))

    async def _tell_evacuation(self, transfer: Transfer, outcome: Outcome) -> None:
        details = _details(transfer) | _what_became(outcome)
        await self._decisions.write(Decision(KIND, transfer.reason, 0.0, details))

    # Measuring -----------------------------------------------------------------------------------------

    def _speed(self, transfer: Transfer) -> Speed | None:
        """The pair's speed over the last reports."""
        since = time.monotonic() - _BEFORE_SECONDS
        return self._speed_since(transfer, dict.fromkeys((transfer.donor, transfer.receiver), since))

    async def _measure(self, transfer: Transfer) -> Speed | None:
        """The pair's speed from now on, after a while."""
        members = [self.members.known.get(name) for name in (transfer.donor, transfer.receiver)]
        begun = {m.instance_id: m.reports[-1].at for m in members if m is not None and m.reports}
        steps = {m.instance_id: m.reports[-1].steps for m in members if m is not None and m.reports}
        until = time.monotonic() + _MEASURE_SECONDS
        while time.monotonic() < until:
            await asyncio.sleep(self._config.poll_seconds)
            now = [self.members.known.get(name) for name in steps]
            if any(m is None or not m.reports for m in now):
                return None
            made = [m.reports[-1].steps - steps[m.instance_id] for m in now if m is not None]
            if min(made) >= _MEASURE_STEPS:
                break
        return self._speed_since(transfer, begun)

    def _speed_since(self, transfer: Transfer, begun: dict[str, float]) -> Speed | None:
        together, longest = 0.0, 0.0
        for name in (transfer.donor, transfer.receiver):
            member = self.members.known.get(name)
            reports = [r for r in member.reports if r.at >= begun.get(name, 0.0)] if member else []
            if len(reports) < 2:
                return None
            together += tokens_per_second(reports[0], reports[-1])
            longest = max(longest, step_seconds(reports[0], reports[-1]))
        return Speed(together, longest)


def _achieved(rule: Rule, before: Speed, after: Speed) -> float:
    """In the terms of the prediction: tokens a second, or for levelling the longer engine step."""
    if rule is Rule.LEVEL:
        return before.step_seconds / after.step_seconds - 1 if after.step_seconds else 0.0
    return after.tokens_per_second / before.tokens_per_second - 1 if before.tokens_per_second else 0.0


def _details(transfer: Transfer) -> dict[str, object]:
    return {
        "rule": transfer.rule.value,
        "donor": transfer.donor,
        "receiver": transfer.receiver,
        "samples": len(transfer.keys),
    }


def _what_became(outcome: Outcome) -> dict[str, object]:
    return {
        "moved": outcome.moved,
        "bytes": outcome.bytes,
        "refused": dict(outcome.refused),
        "failed": dict(outcome.failed),
    }
