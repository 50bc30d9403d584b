"""Continue samples that have called a tool with tokens of their environments, or end them without any."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from paceline.errors import Violation
from paceline.v1 import rollout_pb2 as pb
from paceline.v1 import sample_pb2
from services.contracts.errors import FailedPrecondition, InvalidArgument
from services.gateway.api.intake import BatchRecovery, FleetChecks, check_batch_name, not_in_work
from services.gateway.journal.record import BatchRecord
from services.gateway.metrics import GatewayMetrics
from services.gateway.scheduler.active_batches import ActiveBatches, RunningBatch
from services.gateway.scheduler.scheduler import Scheduler
from services.gateway.state.calls import CallAnswer, CallRules, check_continuation, effect_of_continuation

log = structlog.get_logger(__name__)

# Most continuations of one call: they are checked and made without yielding to the event loop.
_MOST = 1024
# Seconds between two checks for samples that have waited too long.
_CHECK_SECONDS = 1.0


@dataclass(eq=False)
class ToolCalls:
    """Answers to tool calls, and the end of samples that get none, for one term of leadership."""

    checks: FleetChecks
    batches: ActiveBatches
    scheduler: Scheduler
    recovery: BatchRecovery
    metrics: GatewayMetrics

    async def resume(self, request: pb.ContinueSamplesRequest) -> pb.ContinueSamplesResponse:
        """Continue samples, all or none; return once the journal has the tokens that they continue with."""
        key = (request.run_id, request.batch_id)
        check_batch_name(key)
        if violations := _check_count(request):
            raise InvalidArgument(violations)
        record = await self.recovery.known(key)
        self.batches.use(key)
        running = self.batches.by_key.get(key)
        if running is None:
            if record.is_complete:
                return pb.ContinueSamplesResponse()
            raise not_in_work(key)
        if running.batch.tools is None:
            raise FailedPrecondition(
                "NO_TOOLS", f"batch {'/'.join(key)} has no `tools`: its samples call none", batch_id=key[1]
            )
        answers = self._effects(running, record, request.continuations)
        # No await between the checks and the changes.
        safe, continued = list[asyncio.Future[None]](), 0
        for continuation, (index, answer) in zip(request.continuations, answers, strict=True):
            if answer is CallAnswer.RESUME:
                safe.append(self.scheduler.answer(running, index, continuation.token_ids))
            elif answer is CallAnswer.END:
                stop = sample_pb2.FINISH_REASON_STOP
                safe.append(self.scheduler.end_call(running, index, stop))
            elif index in running.unsafe:
                # The same continuation was made before, and is not durable yet.
                safe.append(running.unsafe[index][1])
            continued += answer is not CallAnswer.SKIP
        if safe:
            # `wait` does not cancel the futures, which other calls may wait for, if this call is cancelled.
            await asyncio.wait(safe)
        if any(each.cancelled() for each in safe):
            raise not_in_work(key)
        return pb.ContinueSamplesResponse(continued=continued)

    async def run(self) -> None:
        """End samples that have waited too long, until cancelled."""
        while True:
            await asyncio.sleep(_CHECK_SECONDS)
            now = time.monotonic()
            for running in list(self.batches.by_key.values()):
                if running.batch.tools is not None:
                    self._give_up(running, running.batch.tools, now)

    def _give_up(self, running: RunningBatch, tools: CallRules, now: float) -> None:
        overdue = running.calls.overdue(now - tools.wait_seconds)
        for index in overdue:
            self.scheduler.end_call(running, index, sample_pb2.FINISH_REASON_ABANDONED)
        if overdue:
            self.metrics.abandoned_calls.inc(len(overdue))
            log.warning(
                "calls_abandoned", batch=running.batch.key, samples=len(overdue), seconds=tools.wait_seconds
            )

    def _effects(
        self, running: RunningBatch, record: BatchRecord, continuations: Sequence[pb.Continuation]
    ) -> list[tuple[int, CallAnswer]]:
        """Return the sample of each continuation, and the effect on it."""
        found, violations, limits = list[tuple[int, CallAnswer]](), list[Violation](), self.checks.limits()
        seen = dict[int, int]()
        for number, each in enumerate(continuations):
            field = f"continuations[{number}]"
            index = record.index_of(each.prompt_id, each.slot)
            if index is None or index >= len(running.batch.samples):
                fault = f"prompt {each.prompt_id!r} slot {each.slot} is not in the batch"
                violations.append(Violation(field, fault))
                continue
            first = seen.setdefault(index, number)
            if first != number:
                violations.append(Violation(field, f"is of the sample of continuations[{first}]"))
                continue
            violations += check_continuation(each, running.batch.group_of(index), limits, field)
            found.append((index, effect_of_continuation(running.batch.samples[index], each, field)))
        if violations:
            raise InvalidArgument(violations)
        return found


def _check_count(request: pb.ContinueSamplesRequest) -> list[Violation]:
    given = len(request.continuations)
    return [] if 1 <= given <= _MOST else [Violation("continuations", f"has {given}; must have 1 to {_MOST}")]
