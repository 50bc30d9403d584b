"""Continuation of samples that have called a tool: with tokens of their environments, or their end without them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from paceline.errors import Violation
from paceline.v1 import rollout_pb2 as pb
from paceline.v1 import sample_pb2
from services.contracts.errors import FailedPrecondition, InvalidArgument, Unavailable
from services.contracts.gateway_keys import BatchKey
from services.gateway.api.intake import BatchRecovery, RolloutIntake
from services.gateway.api.validation import check_names
from services.gateway.journal.record import BatchRecord
from services.gateway.metrics import GatewayMetrics
from services.gateway.scheduler.active_batches import RunningBatch
from services.gateway.state.calls import CallAnswer, CallRules, check_continuation, effect_of_continuation

log = structlog.get_logger(__name__)

# Continuations of one call: they are checked and made without a pause between them.
_MOST = 1024
# Longest time between two looks for samples that have waited too long.
_LOOK = 1.0


@dataclass(eq=False)
class ToolCalls:
    """Answers to tool calls, and the end of samples that get none, for one term of leadership."""

    intake: RolloutIntake
    recovery: BatchRecovery
    metrics: GatewayMetrics

    async def go_on(self, request: pb.ContinueSamplesRequest) -> pb.ContinueSamplesResponse:
        """Go on with samples, all or none, once the journal has what they go on with."""
        key = (request.run_id, request.batch_id)
        if violations := check_names(*key) or _check_count(request):
            raise InvalidArgument(violations)
        record = await self.recovery.known(key)
        self.intake.batches.use(key)
        running = self.intake.batches.by_key.get(key)
        if running is None:
            if record.is_complete:
                return pb.ContinueSamplesResponse()
            raise _not_here(key)
        if running.batch.tools is None:
            raise FailedPrecondition(
                "NO_TOOLS", f"batch {'/'.join(key)} has no `tools`: its samples call none", batch_id=key[1]
            )
        answers = self._judged(running, record, request.continuations)
        # No await between the judgement and what comes of it.
        safe, continued = list[asyncio.Future[None]](), 0
        for continuation, (index, answer) in zip(request.continuations, answers, strict=True):
            if answer is CallAnswer.RESUME:
                safe.append(self.intake.scheduler.answer(running, index, continuation.token_ids))
            elif answer is CallAnswer.END:
                stop = sample_pb2.FINISH_REASON_STOP
                safe.append(self.intake.scheduler.end_call(running, index, stop))
            elif index in running.unsafe:
                # The same was asked for before, and is not safe yet.
                safe.append(running.unsafe[index][1])
            continued += answer is not CallAnswer.SKIP
        if safe:
            # A call that is cancelled must not cancel what others wait for.
            await asyncio.wait(safe)
        if any(each.cancelled() for each in safe):
            raise _not_here(key)
        return pb.ContinueSamplesResponse(continued=continued)

    async def run(self) -> None:
        """End samples that have waited too long, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK)
            now = time.monotonic()
            for running in list(self.intake.batches.by_key.values()):
                if running.batch.tools is not None:
                    self._give_up(running, running.batch.tools, now)

    def _give_up(self, running: RunningBatch, tools: CallRules, now: float) -> None:
        overdue = running.calls.overdue(now - tools.wait_seconds)
        for index in overdue:
            self.intake.scheduler.end_call(running, index, sample_pb2.FINISH_REASON_ABANDONED)
        if overdue:
            self.metrics.abandoned_calls.inc(len(overdue))
            log.warning(
                "calls_abandoned", batch=running.batch.key, samples=len(overdue), seconds=tools.wait_seconds
            )

    def _judged(
        self, running: RunningBatch, record: BatchRecord, continuations: Sequence[pb.Continuation]
    ) -> list[tuple[int, CallAnswer]]:
        """Return the sample of each continuation, and what is to be done with it."""
        found, violations, limits = list[tuple[int, CallAnswer]](), list[Violation](), self.intake.limits()
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


def _not_here(key: BatchKey) -> Unavailable:
    return Unavailable(f"batch {'/'.join(key)} is not being worked on here; come again")
