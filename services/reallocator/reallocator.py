"""Poll the instances, decide every `decision_steps` engine steps, and have samples moved.

After each transfer a review measures its cost and its gain on the pair of instances, and the costs are learned.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from statistics import fmean

import structlog

from paceline.times import seconds_of
from paceline.v1 import fleet_pb2
from services.platform.redis.decision_log import DecisionLog, DecisionRecord
from services.platform.redis.registry import InstanceRecord, Registry
from services.platform.tasks import end, is_cancelled
from services.reallocator.config import ReallocatorConfig
from services.reallocator.members import PolledInstance, PolledInstances
from services.reallocator.metrics import ReallocatorMetrics
from services.reallocator.moves import Evacuation, MoveOutcome, Mover
from services.reallocator.planning import throughput
from services.reallocator.planning.decision_scope import DecisionScope, Name, instance_view, mean_length
from services.reallocator.planning.learned_costs import LearnedCosts
from services.reallocator.planning.plan import plan
from services.reallocator.planning.records import InstanceView, LoadView, MoveBy, ReallocationRules, Transfer
from services.reallocator.planning.throughput import InstanceReport, Roofline, Speed, steady

log = structlog.get_logger(__name__)

_DECISION_KIND, _OUTCOME_KIND = "migration", "migration_outcome"
"""Kinds of entries in the decision log: a transfer, and its outcome."""
# Step times are learned from at least this many engine steps with the same number of samples.
_LEARN_STEPS = 16
# The registry is read after this many polls or this many seconds, whichever comes first.
_REGISTRY_POLLS, _REGISTRY_SECONDS = 5, 1.0
# Longest interval between polls, in multiples of the configured one.
_MAX_POLL_INTERVALS = 2.0
# The gain is measured over this many engine steps after the moves, or this many seconds.
_MEASURE_STEPS, _MEASURE_SECONDS = 32, 3.0
# Length of the interval before the moves that their gain is compared with.
_BEFORE_SECONDS = 1.0


class Reallocator:
    """One term of leadership: `run` it until it is cancelled. Instances finish moves under way on their own."""

    def __init__(
        self,
        config: ReallocatorConfig,
        registry: Registry,
        decisions: DecisionLog,
        metrics: ReallocatorMetrics,
        roofline: Callable[[InstanceRecord], Roofline],
        learned: LearnedCosts,
    ) -> None:
        self.members = PolledInstances(config, registry, roofline)
        self._config = config
        self._decisions = decisions
        self._metrics = metrics
        self._learned = learned
        self._mover = Mover(config, self.members, metrics, learned.costs)
        self._evacuation = Evacuation(
            self.members, self._mover, self._rules, self._list_views, self._report_evacuation
        )
        self._scope = DecisionScope(config.decision_steps, config.cooldown_decisions)
        # Ids of the instances that take part in a transfer now.
        self._busy: set[str] = set()
        # Samples that have left each instance by a move since it was last listed.
        self._left: dict[str, set[str]] = {}
        # Ids of the known instances; metrics and listings are kept for them.
        self._observed: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Poll, learn, and decide until cancelled."""
        poll = self._config.poll_seconds
        try:
            while not is_cancelled():
                await self.members.refresh(min(_REGISTRY_POLLS * poll, _REGISTRY_SECONDS))
                self._learn()
                self._evacuation.watch()
                self._metrics.evacuating.set(len(self._evacuation.tasks))
                await self._decide_if_due()
                await asyncio.sleep(self._poll_interval())
        finally:
            try:
                await end((*self._tasks, *self._evacuation.tasks.values()))
            finally:
                await self.members.close()

    def _poll_interval(self) -> float:
        """Return the seconds until the next poll, at about the next decision: polls cost engine time."""
        poll, serving = self._config.poll_seconds, self._serving()
        if self._tasks or len(serving) < 2:
            return poll
        step = min(
            (seconds_of(m.status.load.step_time) for m in serving if m.status is not None), default=0.0
        )
        left = self._scope.steps_left(_steps_of(serving)) * step
        return min(max(left, poll), _MAX_POLL_INTERVALS * poll)

    def _serving(self) -> list[PolledInstance]:
        return [m for m in self.members.known.values() if m.is_in(fleet_pb2.INSTANCE_STATE_SERVING)]

    # Observing instances ---------------------------------------------------------------------------------

    def _learn(self) -> None:
        self._forget_others(self.members.known.keys())
        for member in self.members.known.values():
            self._metrics.samples.labels(member.instance_id).set(member.samples)
            now = steady(member.reports, member.learned_at)
            if now is not None and now.steps >= _LEARN_STEPS:
                member.roofline.observe(now.samples, now.step_seconds, now.tokens_per_step, member.context)
                member.learned_at = member.reports[-1].at

    def _forget_others(self, known: Collection[str]) -> None:
        """Forget the instances that are gone: a pod of a Deployment never comes back under its name."""
        for instance_id in self._observed.difference(known):
            self._left.pop(instance_id, None)
            self._learned.forget(instance_id)
            self._metrics.forget_instance(instance_id)
        self._observed = set(known)

    async def _list_views(self, members: Sequence[PolledInstance]) -> list[InstanceView]:
        """Return the views of the instances that answer."""
        listed = await asyncio.gather(*(member.list_samples() for member in members))
        now, found = time.monotonic(), []
        for member, answer in zip(members, listed, strict=True):
            if answer is None:
                continue
            member.context = mean_length(answer)
            name, epoch = member.instance_id, member.record.epoch
            remaining_lengths = self._learned.lengths_of(member.record.model)
            lengths: dict[Hashable, int] = {each.key: each.response_tokens for each in answer.samples}
            remaining_lengths.learn(name, lengths, self._left.pop(name, ()))
            reachable = not self._mover.unreachable.is_avoided(name, epoch, now)
            found.append(
                instance_view(
                    name,
                    member.record.model,
                    answer,
                    member.roofline,
                    remaining_lengths,
                    gives=self._scope.gives(name),
                    receives=self._scope.receives(name) and reachable,
                )
            )
            self._metrics.threshold.labels(name).set(found[-1].threshold)
        self._spread_context(
            [each for each, answer in zip(members, listed, strict=True) if answer is not None]
        )
        return found

    def _spread_context(self, listed: Sequence[PolledInstance]) -> None:
        """Assume that samples of unlisted instances are as long as samples of the listed ones of the same model."""
        contexts: defaultdict[str, list[float]] = defaultdict(list)
        for member in listed:
            contexts[member.record.model].append(member.context)
        names = {member.instance_id for member in listed}
        for name, member in self.members.known.items():
            if name not in names and (lengths := contexts.get(member.record.model)):
                member.context = fmean(lengths)

    def _rules(self) -> ReallocationRules:
        return self._config.rules(self._learned)

    # Deciding ------------------------------------------------------------------------------------------

    async def _decide_if_due(self) -> None:
        serving, loop = self._serving(), asyncio.get_running_loop()
        steps = _steps_of(serving)
        if not self._scope.is_due(steps, [member.samples for member in serving]):
            return
        until = loop.time() + self._config.stale_seconds
        with self._metrics.decision_seconds.time():
            free = [member for member in serving if member.instance_id not in self._busy]
            fleet = await self._list_views(self._promising(free))
            transfers = plan(fleet, self._rules()) if loop.time() < until else None
        if transfers is None:
            # The listings are too old by now. The next poll tries again.
            self._metrics.decisions.labels("late").inc()
            return
        self._scope.decided(steps, transfers)
        self._learned.fade()
        self._metrics.show_learned(self._learned)
        self._metrics.decisions.labels("move" if transfers else "keep").inc()
        for transfer in transfers:
            self._busy |= {transfer.donor, transfer.receiver}
            task = asyncio.create_task(self._move(transfer, until))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _promising(self, members: Sequence[PolledInstance]) -> Sequence[PolledInstance]:
        """Return the instances to list for this decision."""
        wanted = self._scope.choose([_load_of(each) for each in members], self._rules())
        return [each for each in members if each.instance_id in wanted]

    async def _move(self, transfer: Transfer, until: float) -> None:
        log.info(
            "moving",
            **_details(transfer),
            predicted_gain=round(transfer.predicted_gain, 3),
            reason=transfer.reason,
        )
        self._metrics.predicted_gain.labels(transfer.rule).observe(transfer.predicted_gain)
        review = Review(transfer, self.members, self._learned, self._metrics, self._config.poll_seconds)
        try:
            decision = DecisionRecord(
                _DECISION_KIND, transfer.reason, transfer.predicted_gain, _details(transfer)
            )
            # The moves do not wait for Redis, which may be down.
            _, outcome = await asyncio.gather(
                self._decisions.write(decision), self._mover.carry_out(transfer, until)
            )
        finally:
            self._busy -= {transfer.donor, transfer.receiver}
        self._note_left(transfer, outcome)
        details = _details(transfer, outcome)
        if outcome.moved:
            details |= await review.conclude(outcome)
        log.info("moved", **details)
        reason = f"{outcome.moved} of {len(transfer.moves)} samples were moved"
        await self._decisions.write(DecisionRecord(_OUTCOME_KIND, reason, transfer.predicted_gain, details))

    async def _report_evacuation(self, transfer: Transfer, outcome: MoveOutcome) -> None:
        self._note_left(transfer, outcome)
        details = _details(transfer, outcome)
        await self._decisions.write(DecisionRecord(_DECISION_KIND, transfer.reason, 0.0, details))

    def _note_left(self, transfer: Transfer, outcome: MoveOutcome) -> None:
        """Remember the moved samples, so that they are not counted as ended."""
        self._left.setdefault(transfer.donor, set()).update(move.key for move in outcome.done)


def _steps_of(members: Iterable[PolledInstance]) -> dict[Name, int]:
    return {(m.instance_id, m.record.epoch): m.reports[-1].steps for m in members if m.reports}


def _load_of(member: PolledInstance) -> LoadView:
    curve = member.roofline.curve()
    version = 0 if member.status is None else member.status.policy_version
    peers = (member.record.model, version)
    return LoadView(member.instance_id, member.samples, curve, member.roofline.threshold(curve), peers)


def _details(transfer: Transfer, outcome: MoveOutcome | None = None) -> dict[str, object]:
    """Return the details of a transfer for the decision log, with its outcome once there is one."""
    details: dict[str, object] = {
        "rule": transfer.rule.value,
        "donor": transfer.donor,
        "receiver": transfer.receiver,
        "samples": len(transfer.moves),
        "by": {way.value: transfer.count(way) for way in MoveBy},
    }
    if outcome is not None:
        details |= {
            "moved": outcome.moved,
            "moved_by": {way.value: sum(move.by is way for move in outcome.done) for way in MoveBy},
            "bytes": outcome.bytes,
            "refused": dict(outcome.refused),
            "failed": dict(outcome.failed),
        }
    return details


class Review:
    """Measured cost and gain of one transfer, by the reports of its two instances.

    Create it before the moves begin: it keeps the speed of the pair until then.
    """

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
            name: throughput.settled(member.reports, since)
            for name in self._last
            if (member := members.known.get(name)) is not None
        }
        self._before = self._speed(self._earlier)

    async def conclude(self, outcome: MoveOutcome) -> dict[str, object]:
        """Measure for long enough, learn, and return details for the decision log."""
        # After a move by prefix the receiver has only begun to prefill.
        await asyncio.sleep(self._poll_seconds)
        details = self._learn_cost(outcome)
        after = None if self._before is None else await self._measure()
        member = self._members.known.get(self._transfer.donor)
        if self._before is None or after is None or member is None:
            return details
        achieved = throughput.achieved_gain(self._before, after, outcome.moved, member.roofline.curve())
        rule, predicted = self._transfer.rule, self._transfer.rate_gain
        if achieved is None:
            # The samples ended too early for any gain.
            self._learned.trust.learn(rule, predicted, 0.0)
            return details
        self._metrics.achieved_gain.labels(rule).observe(achieved)
        self._learned.trust.learn(rule, predicted, achieved)
        return details | {
            "predicted_rate_gain": predicted,
            "achieved_gain": achieved,
            "tokens_per_second": [self._before.tokens_per_second, after.tokens_per_second],
            "step_seconds": [self._before.step_seconds, after.step_seconds],
        }

    def _learn_cost(self, outcome: MoveOutcome) -> dict[str, object]:
        donor, receiver = (
            self._lost_seconds(name) for name in (self._transfer.donor, self._transfer.receiver)
        )
        member = self._members.known.get(self._transfer.donor)
        if member is not None and member.status is not None:
            self._learned.costs.learn_loss(
                outcome.done, donor, receiver, seconds_of(member.status.load.step_time)
            )
        return {"engine_seconds_lost": [donor, receiver]}

    def _lost_seconds(self, name: str) -> float | None:
        """Return the engine time that an instance has lost since the moves began, relative to its earlier pace."""
        member, since = self._members.known.get(name), self._last.get(name)
        if member is None or since is None or not member.reports:
            return None
        earlier = self._earlier.get(name, [])
        now, curve = member.reports[-1], member.roofline.curve()
        if len(earlier) < 2:
            return None
        # The time of a step depends on the number of samples; about half of the steps had the new number.
        change = curve.step_seconds(now.samples) / curve.step_seconds(since.samples) if since.samples else 1.0
        return throughput.lost_seconds(
            since, now, throughput.step_seconds(earlier[0], earlier[-1]) * (1 + change) / 2
        )

    async def _measure(self) -> Speed | None:
        """Return the pair's speed from now until enough steps are measured or an instance is idle."""
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
        rate, longest = 0.0, 0.0
        samples: list[float] = []
        for name in (self._transfer.donor, self._transfer.receiver):
            reports = over.get(name, ())
            if len(reports) < 2:
                return None
            rate += throughput.tokens_per_second(reports[0], reports[-1])
            longest = max(longest, throughput.step_seconds(reports[0], reports[-1]))
            samples.append(throughput.mean_samples(reports))
        return Speed(rate, longest, *samples)
