"""Carries out transfers: asks the donor to move each sample, a few at a time, and takes in what came of it."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from dataclasses import dataclass, field
from math import inf

import structlog

from paceline.internal.v1 import migration_pb2 as pb
from services.reallocator.config import ReallocatorConfig
from services.reallocator.learned import Costs
from services.reallocator.members import Member, Members, Unanswered, answered
from services.reallocator.metrics import ReallocatorMetrics
from services.reallocator.price import By
from services.reallocator.records import Move, Transfer

log = structlog.get_logger(__name__)

# Beyond the time for a move, for its answer.
_ANSWER_SECONDS = 2.0
# Reasons that say something of the receiver, not of the sample: the rest of the transfer would fare as ill.
_RECEIVERS = range(pb.MOVE_REASON_CLOSED, pb.MOVE_REASON_RECEIVER_BUSY + 1)
_UNREACHABLE = (pb.MOVE_REASON_RECEIVER_LOST, pb.MOVE_REASON_CONNECTION)
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0
_BY = {By.KV: pb.MOVE_BY_KV, By.PREFIX: pb.MOVE_BY_PREFIX}


@dataclass(slots=True)
class Outcome:
    """What became of a transfer: the samples that were moved, and how often which reason kept one where it was."""

    done: list[Move] = field(default_factory=list)
    bytes: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    # Nothing more is sent to this receiver for now.
    stopped: bool = False

    @property
    def moved(self) -> int:
        """How many samples."""
        return len(self.done)


@dataclass(slots=True)
class _Failing:
    epoch: int
    failures: int = 0
    until: float = 0.0


class Shunned:
    """Receivers that could not be reached: left alone for a pause that doubles. Pure, times are passed in.

    An instance that begins anew, under another epoch, has not failed yet.
    """

    def __init__(self) -> None:
        self._failing: dict[str, _Failing] = {}

    def failed(self, instance_id: str, epoch: int, now: float) -> None:
        """Nothing could be sent there. What is said of it during its pause is of the same failure."""
        known = self._failing.get(instance_id)
        if known is None or known.epoch != epoch:
            known = self._failing[instance_id] = _Failing(epoch)
        if known.failures and now < known.until:
            return
        known.until = now + min(_FIRST_PAUSE * 2 ** min(known.failures, 16), _LONGEST_PAUSE)
        known.failures += 1

    def worked(self, instance_id: str) -> None:
        """A sample has arrived there."""
        self._failing.pop(instance_id, None)

    def is_shunned(self, instance_id: str, epoch: int, now: float) -> bool:
        """Whether it is to be left alone."""
        known = self._failing.get(instance_id)
        return known is not None and known.epoch == epoch and now < known.until


class Mover:
    """`shunned` and `costs` learn from every move."""

    def __init__(
        self, config: ReallocatorConfig, members: Members, metrics: ReallocatorMetrics, costs: Costs
    ) -> None:
        self.shunned = Shunned()
        self._costs = costs
        self._config = config
        self._members = members
        self._metrics = metrics
        self._slots: dict[str, asyncio.Semaphore] = {}

    async def carry_out(self, transfer: Transfer, until: float = inf) -> Outcome:
        """Moves the samples of a transfer; no move begins after `until`, of the loop's time. Never raises for what
        an instance does."""
        outcome = Outcome()
        donor, receiver = (self._members.known.get(name) for name in (transfer.donor, transfer.receiver))
        if donor is None or receiver is None:
            outcome.refused["gone"] += len(transfer.keys)
            return outcome
        slots = self._slots.setdefault(transfer.donor, asyncio.Semaphore(self._config.moves_at_once))

        loop = asyncio.get_running_loop()

        async def carry(move: Move) -> None:
            async with slots:
                if loop.time() > until:
                    # Who knows where the sample is by now.
                    outcome.refused["stale"] += 1
                elif not outcome.stopped:
                    await self._move(transfer, donor, receiver, move, outcome)

        await asyncio.gather(*map(carry, transfer.moves))
        return outcome

    async def _move(
        self, transfer: Transfer, donor: Member, receiver: Member, move: Move, outcome: Outcome
    ) -> None:
        request = pb.MoveRequest(
            key=move.key,
            receiver_id=receiver.instance_id,
            receiver_address=receiver.record.address,
            migration_id=uuid.uuid4().hex,
            timeout_seconds=self._config.move_timeout_seconds,
            by=_BY[move.by],
        )
        try:
            with self._metrics.move_seconds.time():
                seconds = self._config.move_timeout_seconds + _ANSWER_SECONDS
                answer = await answered(donor.migration.Move(request, timeout=seconds))
        except Unanswered as error:
            # The donor finishes what it has begun, or is gone and its samples with it: both are the gateway's.
            reason = str(error)
            outcome.failed[reason] += 1
            outcome.stopped = True
            self._metrics.failures.labels(reason).inc()
            return
        self._settle(transfer, receiver.record.epoch, answer.migration, move, outcome)

    def _settle(
        self, transfer: Transfer, epoch: int, migration: pb.Migration, move: Move, outcome: Outcome
    ) -> None:
        if migration.outcome == pb.MOVE_OUTCOME_MOVED:
            outcome.done.append(move)
            outcome.bytes += migration.copied_bytes + migration.delta_bytes
            self.shunned.worked(transfer.receiver)
            self._metrics.moves.labels(transfer.rule, move.by).inc()
            if move.by is By.PREFIX:
                return
            self._costs.stalled(move.by, migration.stall_steps, migration.copy_seconds, move.tokens)
            self._metrics.bytes.inc(migration.copied_bytes + migration.delta_bytes)
            self._metrics.stall_seconds.observe(migration.stall_seconds)
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
            self.shunned.failed(transfer.receiver, epoch, asyncio.get_running_loop().time())
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
