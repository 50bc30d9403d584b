"""Carry out transfers: ask the donor to move each sample, a few at a time, and count the outcomes.

`Mover` carries out the transfers of one decision. `Evacuation` empties draining instances, round after round.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from weakref import WeakValueDictionary

import structlog

from paceline.internal.v1 import migration_pb2 as pb
from paceline.times import duration, seconds_of
from paceline.v1 import fleet_pb2
from services.platform.tasks import ExponentialBackoff
from services.reallocator.config import ReallocatorConfig
from services.reallocator.members import PolledInstance, PolledInstances, Unanswered, answered
from services.reallocator.metrics import ReallocatorMetrics
from services.reallocator.planning.decision_scope import MOST_LISTED, in_turn
from services.reallocator.planning.learned_costs import MoveCosts
from services.reallocator.planning.plan import evacuate
from services.reallocator.planning.records import InstanceView, Move, MoveBy, ReallocationRules, Transfer

log = structlog.get_logger(__name__)

# Time for the answer of a move, beyond the time for the move itself.
_ANSWER_SECONDS = 2.0
# Reasons that concern the receiver, not the sample: the other moves of the transfer would fail as well.
_RECEIVERS = range(pb.MOVE_REASON_CLOSED, pb.MOVE_REASON_RECEIVER_BUSY + 1)
_UNREACHABLE = (pb.MOVE_REASON_RECEIVER_LOST, pb.MOVE_REASON_CONNECTION)
FIRST_DELAY, LONGEST_DELAY = 1.0, 30.0
"""Seconds for which an unreachable receiver is avoided: at first, and at most after doubling."""
_FORGOTTEN = 600.0
"""Seconds after the avoidance of a receiver until it is forgotten, if it does not fail again."""
# Seconds until the next round of an evacuation after one that moved nothing: the first delay, and the longest.
_FIRST_ROUND_DELAY, _LONGEST_ROUND_DELAY = 0.05, 1.0
_BY = {MoveBy.KV: pb.MOVE_BY_KV, MoveBy.PREFIX: pb.MOVE_BY_PREFIX}


@dataclass(slots=True)
class MoveOutcome:
    """Outcome of a transfer: the moves that were made, and counts of reasons for which others were not."""

    done: list[Move] = field(default_factory=list)
    bytes: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    # True when no further move of the transfer may begin.
    stopped: bool = False

    @property
    def moved(self) -> int:
        """Number of samples that were moved."""
        return len(self.done)


@dataclass(slots=True)
class _Failures:
    epoch: int
    backoff: ExponentialBackoff = field(
        default_factory=lambda: ExponentialBackoff(FIRST_DELAY, LONGEST_DELAY)
    )
    until: float = 0.0


class UnreachableReceivers:
    """Receivers that could not be reached. Each failure doubles the time for which one is avoided.

    Pure: times are passed in. A restarted instance, which has another epoch, is not avoided.
    """

    def __init__(self) -> None:
        self._by_receiver: dict[str, _Failures] = {}

    def failed(self, instance_id: str, epoch: int, now: float) -> None:
        """Avoid a receiver from now on; while it is avoided, a further failure does not prolong that."""
        # A receiver that failed long ago will probably not return.
        self._by_receiver = {
            name: each for name, each in self._by_receiver.items() if now < each.until + _FORGOTTEN
        }
        known = self._by_receiver.get(instance_id)
        if known is None or known.epoch != epoch:
            known = self._by_receiver[instance_id] = _Failures(epoch)
        if known.backoff.failures and now < known.until:
            return
        known.until = now + known.backoff.failed()

    def worked(self, instance_id: str) -> None:
        """Stop avoiding a receiver: a sample has arrived there."""
        self._by_receiver.pop(instance_id, None)

    def is_avoided(self, instance_id: str, epoch: int, now: float) -> bool:
        """Return True while a receiver is avoided."""
        known = self._by_receiver.get(instance_id)
        return known is not None and known.epoch == epoch and now < known.until


class Mover:
    """Carries out transfers. `unreachable` and `costs` learn from every move."""

    def __init__(
        self,
        config: ReallocatorConfig,
        members: PolledInstances,
        metrics: ReallocatorMetrics,
        costs: MoveCosts,
    ) -> None:
        self.unreachable = UnreachableReceivers()
        self._costs = costs
        self._config = config
        self._members = members
        self._metrics = metrics
        # By donor, while a transfer from it is under way.
        self._slots: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def carry_out(self, transfer: Transfer, until: float = inf) -> MoveOutcome:
        """Move the samples of a transfer; no move begins after `until`, a time of the event loop.

        Failures of instances are part of the outcome, never raised.
        """
        outcome = MoveOutcome()
        donor, receiver = (self._members.known.get(name) for name in (transfer.donor, transfer.receiver))
        if donor is None or receiver is None:
            outcome.refused["gone"] += len(transfer.keys)
            return outcome
        slots = self._slots.setdefault(transfer.donor, asyncio.Semaphore(self._config.moves_at_once))
        loop = asyncio.get_running_loop()

        async def move_one(move: Move) -> None:
            async with slots:
                if loop.time() > until:
                    # The listing is too old: the sample may have ended or moved.
                    outcome.refused["stale"] += 1
                elif not outcome.stopped:
                    await self._move(transfer, donor, receiver, move, outcome)

        await asyncio.gather(*map(move_one, transfer.moves))
        return outcome

    async def _move(
        self,
        transfer: Transfer,
        donor: PolledInstance,
        receiver: PolledInstance,
        move: Move,
        outcome: MoveOutcome,
    ) -> None:
        request = pb.MoveRequest(
            key=move.key,
            receiver_id=receiver.instance_id,
            receiver_address=receiver.record.address,
            migration_id=uuid.uuid4().hex,
            timeout=duration(self._config.move_timeout_seconds),
            by=_BY[move.by],
        )
        try:
            with self._metrics.move_seconds.time():
                seconds = self._config.move_timeout_seconds + _ANSWER_SECONDS
                answer = await answered(donor.migration.Move(request, timeout=seconds))
        except Unanswered as error:
            # The donor finishes the move, or is gone with its samples; the gateway handles both.
            reason = str(error)
            outcome.failed[reason] += 1
            outcome.stopped = True
            self._metrics.failures.labels(reason).inc()
            return
        self._settle(transfer, receiver.record.epoch, answer.migration, move, outcome)

    def _settle(
        self, transfer: Transfer, epoch: int, migration: pb.Migration, move: Move, outcome: MoveOutcome
    ) -> None:
        if migration.outcome == pb.MOVE_OUTCOME_MOVED:
            outcome.done.append(move)
            outcome.bytes += migration.copied_bytes + migration.delta_bytes
            self.unreachable.worked(transfer.receiver)
            self._metrics.moves.labels(transfer.rule, move.by).inc()
            if move.by is MoveBy.PREFIX:
                return
            self._costs.learn_stall(
                move.by, migration.stall_steps, seconds_of(migration.copy_time), move.tokens
            )
            self._metrics.bytes.inc(migration.copied_bytes + migration.delta_bytes)
            self._metrics.stall_seconds.observe(seconds_of(migration.stall_time))
            self._metrics.stall_steps.observe(migration.stall_steps)
            return
        reason = _reason_name(migration.reason)
        if migration.outcome == pb.MOVE_OUTCOME_REFUSED:
            outcome.refused[reason] += 1
            self._metrics.refusals.labels(reason).inc()
        else:
            outcome.failed[reason] += 1
            self._metrics.failures.labels(reason).inc()
        outcome.stopped = outcome.stopped or migration.reason in _RECEIVERS
        if migration.reason in _UNREACHABLE:
            outcome.stopped = True
            self.unreachable.failed(transfer.receiver, epoch, asyncio.get_running_loop().time())
        log.info(
            "sample_not_moved",
            donor=transfer.donor,
            receiver=transfer.receiver,
            key=migration.key,
            reason=reason,
            message=migration.message,
        )


def _reason_name(reason: int) -> str:
    known = reason in pb.MoveReason.values()
    return pb.MoveReason.Name(reason)[len("MOVE_REASON_") :].lower() if known else str(reason)


class Evacuation:
    """Evacuation of draining instances: one task for each, which ends when the instance is empty, gone or resumed.

    Each round lists the samples of a few instances with room, the emptiest first. After a round that moved nothing,
    the next round lists other instances: a large fleet has more samples than one process can look at.
    """

    def __init__(
        self,
        members: PolledInstances,
        mover: Mover,
        rules: Callable[[], ReallocationRules],
        list_views: Callable[[list[PolledInstance]], Awaitable[list[InstanceView]]],
        report: Callable[[Transfer, MoveOutcome], Awaitable[None]],
    ) -> None:
        """Use `list_views` to look at instances, and pass the outcome of each transfer to `report`."""
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._members = members
        self._mover = mover
        self._rules = rules
        self._list_views = list_views
        self._report = report

    def watch(self) -> None:
        """Start a task for every instance that has begun to drain."""
        self.tasks = {name: task for name, task in self.tasks.items() if not task.done()}
        for member in self._members.known.values():
            leaving = member.is_in(fleet_pb2.INSTANCE_STATE_DRAINING) and member.samples
            if leaving and member.instance_id not in self.tasks:
                task = asyncio.create_task(self._empty(member), name=f"evacuate-{member.instance_id}")
                self.tasks[member.instance_id] = task

    async def _empty(self, member: PolledInstance) -> None:
        log.info("evacuating", instance=member.instance_id, samples=member.samples)
        moved, turn, backoff = 0, 0, ExponentialBackoff(_FIRST_ROUND_DELAY, _LONGEST_ROUND_DELAY)
        while self._is_leaving(member):
            listed = [member, *self._receivers(member, turn)]
            views = {each.instance_id: each for each in await self._list_views(listed)}
            donor = views.pop(member.instance_id, None)
            # It may have been resumed meanwhile.
            if donor is None or not donor.samples or not self._is_leaving(member):
                break
            count = sum(await asyncio.gather(*map(self._round, self._plan(donor, views))))
            moved += count
            if count:
                backoff.succeeded()
                continue
            turn += 1
            await asyncio.sleep(backoff.failed())
        log.info("evacuated", instance=member.instance_id, moved=moved)

    def _is_leaving(self, member: PolledInstance) -> bool:
        """Return True unless it is gone or resumed. An instance that does not answer may still drain."""
        drains = member.status is None or member.is_in(fleet_pb2.INSTANCE_STATE_DRAINING)
        return drains and self._members.known.get(member.instance_id) is member

    def _receivers(self, donor: PolledInstance, turn: int) -> Sequence[PolledInstance]:
        """Return the instances to list in this turn, by status: the emptiest of those that could take samples."""
        now = asyncio.get_running_loop().time()
        able = [each for each in self._members.known.values() if self._could_take(each, donor, now)]
        return in_turn(sorted(able, key=lambda each: (each.samples, each.instance_id)), MOST_LISTED, turn)

    def _could_take(self, receiver: PolledInstance, donor: PolledInstance, now: float) -> bool:
        status, own = receiver.status, donor.status
        if status is None or not receiver.is_in(fleet_pb2.INSTANCE_STATE_SERVING) or receiver is donor:
            return False
        alike = own is None or status.policy_version == own.policy_version
        fits = receiver.samples < receiver.record.max_running and receiver.record.model == donor.record.model
        return alike and fits and not self._is_avoided(receiver.instance_id, now)

    def _plan(self, donor: InstanceView, others: dict[str, InstanceView]) -> list[Transfer]:
        # The cooldown does not apply: these samples have to go somewhere.
        now = asyncio.get_running_loop().time()
        free = [replace(each, receives=not self._is_avoided(name, now)) for name, each in others.items()]
        return evacuate(donor, free, self._rules())

    def _is_avoided(self, instance_id: str, now: float) -> bool:
        member = self._members.known.get(instance_id)
        return member is None or self._mover.unreachable.is_avoided(instance_id, member.record.epoch, now)

    async def _round(self, transfer: Transfer) -> int:
        outcome = await self._mover.carry_out(transfer)
        await self._report(transfer, outcome)
        return outcome.moved
