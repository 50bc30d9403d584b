"""Watches the instances, decides every so many engine steps, has samples moved, and tells what came of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable, Iterable, Sequence

import structlog

from paceline.v1 import fleet_pb2
from services.platform.decisions import Decision, DecisionLog
from services.platform.registry import InstanceRecord, Registry
from services.platform.tasks import end, is_cancelled
from services.reallocator.config import ReallocatorConfig
from services.reallocator.evacuation import Evacuation
from services.reallocator.learned import Learned
from services.reallocator.measured import steady
from services.reallocator.members import Member, Members
from services.reallocator.metrics import ReallocatorMetrics
from services.reallocator.moves import Mover, Outcome
from services.reallocator.plan import plan
from services.reallocator.price import By
from services.reallocator.records import Rules, Standing, Transfer
from services.reallocator.rest import Rest
from services.reallocator.review import Review
from services.reallocator.standing import mean_length, standing
from services.reallocator.threshold import Roofline
from services.reallocator.trigger import Name, Trigger

log = structlog.get_logger(__name__)

KIND, OUTCOME = "migration", "migration_outcome"
"""Kinds of decisions: what is to be moved, and what then became of it."""
# Engine steps with the same samples whose mean time is believed.
_LEARN_STEPS = 16
# The registry is read every so many polls, or after so long, whichever is sooner.
_REGISTRY_POLLS, _REGISTRY_SECONDS = 5, 1.0
# Nothing is waited for longer than so many polls.
_LONGEST_PAUSE_POLLS = 2.0


class Reallocator:
    """Usage: `run` until cancelled. What is being moved then is finished by the instances themselves."""

    def __init__(
        self,
        config: ReallocatorConfig,
        registry: Registry,
        decisions: DecisionLog,
        metrics: ReallocatorMetrics,
        roofline: Callable[[InstanceRecord], Roofline],
        learned: Learned,
    ) -> None:
        self.members = Members(config, registry, roofline)
        self._config = config
        self._decisions = decisions
        self._metrics = metrics
        self._learned = learned
        self._mover = Mover(config, self.members, metrics, learned.costs)
        self._evacuation = Evacuation(
            self.members, self._mover, self._rules, self._look, self._tell_evacuation
        )
        self._trigger = Trigger(config.decision_steps)
        self._rest = Rest(config.rest)
        # Instances that take part in a transfer now.
        self._busy: set[str] = set()
        # Samples that have been moved off an instance since it was last looked at.
        self._left: dict[str, set[str]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Works until cancelled."""
        poll = self._config.poll_seconds
        try:
            while not is_cancelled():
                await self.members.refresh(min(_REGISTRY_POLLS * poll, _REGISTRY_SECONDS))
                self._learn()
                self._evacuation.watch()
                self._metrics.evacuating.set(len(self._evacuation.tasks))
                await self._decide_if_due()
                await asyncio.sleep(self._pause())
        finally:
            try:
                await end((*self._tasks, *self._evacuation.tasks.values()))
            finally:
                await self.members.close()

    def _pause(self) -> float:
        """Until the next poll: about when a decision comes due. Each question takes the instances' time."""
        poll, serving = self._config.poll_seconds, self._serving()
        if self._tasks or len(serving) < 2:
            return poll
        step = min((m.status.load.step_seconds for m in serving if m.status is not None), default=0.0)
        left = self._trigger.steps_left(_steps_of(serving)) * step
        return min(max(left, poll), _LONGEST_PAUSE_POLLS * poll)

    def _serving(self) -> list[Member]:
        return [m for m in self.members.known.values() if m.is_in(fleet_pb2.INSTANCE_STATE_SERVING)]

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
            lifetimes = self._learned.lifetimes_of(member.record.model)
            lengths: dict[Hashable, int] = {each.key: each.response_tokens for each in answer.samples}
            lifetimes.saw(member.instance_id, lengths, self._left.pop(member.instance_id, ()))
            shunned = self._mover.shunned.is_shunned(member.instance_id, member.record.epoch, now)
            found.append(
                standing(
                    member.instance_id,
                    member.record.model,
                    answer,
                    member.roofline,
                    lifetimes,
                    gives=self._rest.gives(member.instance_id),
                    receives=self._rest.receives(member.instance_id) and not shunned,
                )
            )
            self._metrics.threshold.labels(member.instance_id).set(found[-1].threshold)
        return found

    def _rules(self) -> Rules:
        return self._config.rules(self._learned)

    # Deciding ------------------------------------------------------------------------------------------

    async def _decide_if_due(self) -> None:
        serving, loop = self._serving(), asyncio.get_running_loop()
        steps = _steps_of(serving)
        if not self._trigger.is_due(steps, [member.samples for member in serving]):
            return
        until = loop.time() + self._config.stale_seconds
        with self._metrics.decision_seconds.time():
            free = [member for member in serving if member.instance_id not in self._busy]
            fleet = await self._look(free)
            transfers = plan(fleet, self._rules()) if loop.time() < until else None
        if transfers is None:
            # Asked again at the next poll.
            self._metrics.decisions.labels("late").inc()
            return
        self._trigger.decided(steps)
        self._rest.decided(transfers)
        self._learned.fade()
        self._metrics.show_learned(self._learned)
        self._metrics.decisions.labels("move" if transfers else "keep").inc()
        for transfer in transfers:
            self._busy |= {transfer.donor, transfer.receiver}
            task = asyncio.create_task(self._carry_out(transfer, until))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _carry_out(self, transfer: Transfer, until: float) -> None:
        log.info(
            "moving",
            **_details(transfer),
            predicted_gain=round(transfer.predicted_gain, 3),
            reason=transfer.reason,
        )
        self._metrics.predicted_gain.labels(transfer.rule).observe(transfer.predicted_gain)
        review = Review(transfer, self.members, self._learned, self._metrics, self._config.poll_seconds)
        try:
            decision = Decision(KIND, transfer.reason, transfer.predicted_gain, _details(transfer))
            # Redis may be away: the moves do not wait for it.
            _, outcome = await asyncio.gather(
                self._decisions.write(decision), self._mover.carry_out(transfer, until)
            )
        finally:
            self._busy -= {transfer.donor, transfer.receiver}
        self._note_left(transfer, outcome)
        details = _details(transfer) | _what_became(outcome)
        if outcome.moved:
            details |= await review.conclude(outcome)
        log.info("moved", **details)
        reason = f"{outcome.moved} of {len(transfer.moves)} samples were moved"
        await self._decisions.write(Decision(OUTCOME, reason, transfer.predicted_gain, details))

    async def _tell_evacuation(self, transfer: Transfer, outcome: Outcome) -> None:
        self._note_left(transfer, outcome)
        details = _details(transfer) | _what_became(outcome)
        await self._decisions.write(Decision(KIND, transfer.reason, 0.0, details))

    def _note_left(self, transfer: Transfer, outcome: Outcome) -> None:
        """What was moved has not ended."""
        self._left.setdefault(transfer.donor, set()).update(move.key for move in outcome.done)


def _steps_of(members: Iterable[Member]) -> dict[Name, int]:
    return {(m.instance_id, m.record.epoch): m.reports[-1].steps for m in members if m.reports}


def _details(transfer: Transfer) -> dict[str, object]:
    return {
        "rule": transfer.rule.value,
        "donor": transfer.donor,
        "receiver": transfer.receiver,
        "samples": len(transfer.moves),
        "by": {way.value: transfer.count(way) for way in By},
    }


def _what_became(outcome: Outcome) -> dict[str, object]:
    return {
        "moved": outcome.moved,
        "moved_by": {way.value: sum(move.by is way for move in outcome.done) for way in By},
        "bytes": outcome.bytes,
        "refused": dict(outcome.refused),
        "failed": dict(outcome.failed),
    }
