"""BubbleService: translation between the protocol and the plan, and holding polls back."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc

from paceline.internal.v1 import bubble_pb2 as pb
from paceline.internal.v1 import bubble_pb2_grpc as rpc
from services.bubbles.config import BubblesConfig
from services.bubbles.ledger import Ledger
from services.bubbles.metrics import BubbleMetrics
from services.bubbles.plan import Plan
from services.bubbles.records import Answer, Lease, Phase, Poll, Progress, Standing
from services.platform.errors import InvalidArgument
from services.platform.violations import Violation

Context = grpc.aio.ServicerContext[Any, Any]

HOLD_SECONDS = 1.0
"""How long a poll is held back when there is nothing to say."""
_TICK_SECONDS = 1.0
_PHASES = {
    pb.RUN_PHASE_ROLLOUT: Phase.ROLLOUT,
    pb.RUN_PHASE_UPDATE: Phase.UPDATE,
    pb.RUN_PHASE_APPLYING: Phase.APPLYING,
}


class BubbleService(rpc.BubbleServiceServicer):
    """One coordinator process. It is named by the time of its start in nanoseconds, and its leases count up from
    there, so that no two processes give out the same number."""

    def __init__(self, config: BubblesConfig, metrics: BubbleMetrics) -> None:
        self.epoch = time.time_ns()
        self.ledger = Ledger(config.rules(), self.epoch + 1)
        self._plan = Plan(self.ledger)
        self._config = config
        self._metrics = metrics
        self._changed = asyncio.Condition()
        self._announced = 0
        # The newest poll of each instance: an older one that is still held is answered with nothing.
        self._newest: dict[str, object] = {}

    async def run(self) -> None:
        """Lets leases of silent instances expire, until cancelled."""
        while True:
            await asyncio.sleep(min(_TICK_SECONDS, self._config.lease_seconds / 4))
            now = time.time()
            self.ledger.expire(now)
            self._metrics.show(self.ledger, now)
            await self._announce()

    async def SetRun(self, request: pb.SetRunRequest, context: Context) -> pb.SetRunResponse:
        """Notes where a run stands; names the hints that are missing."""
        if violations := _check_run(request):
            raise InvalidArgument(violations)
        missing: list[str] = []
        if request.closed:
            self.ledger.close_run(request.run_id)
        else:
            standing = Standing(
                _PHASES[request.phase],
                request.policy_version,
                request.step,
                request.unfinished,
                request.waiting,
            )
            missing = self.ledger.set_run(request.run_id, standing, request.hint_ids, time.time())
        await self._announce()
        return pb.SetRunResponse(missing_hint_ids=missing)

    async def PutHint(self, request: pb.PutHintRequest, context: Context) -> pb.PutHintResponse:
        """Takes in the samples of a coming step."""
        if violations := _check_hint(request):
            raise InvalidArgument(violations)
        samples = self.ledger.put_hint(request, time.time())
        await self._announce()
        return pb.PutHintResponse(samples=samples)

    async def GetCoverage(self, request: pb.GetCoverageRequest, context: Context) -> pb.GetCoverageResponse:
        """What there is of a step; nothing for a step that is not known."""
        response = pb.GetCoverageResponse()
        for item in self.ledger.coverage(request.run_id, request.step):
            prompt_id, slot = item.key
            response.slots.add(prompt_id=prompt_id, slot=slot, tokens=item.covered, finished=item.finished)
        return response

    async def PollWork(self, request: pb.PollWorkRequest, context: Context) -> pb.PollWorkResponse:
        """Answers at once an instance that runs something; another one when there is something to say."""
        if not request.instance_id:
            raise InvalidArgument([Violation("instance_id", "is empty")])
        poll, turn = self._poll(request), object()
        self._newest[poll.instance_id] = turn
        self.ledger.report(poll, time.time())
        await self._announce()
        # Leases of another process count as well: they run, whoever gave them.
        busy = any(not (each.finished or each.returned) for each in request.progress)
        try:
            with self._metrics.polls.track_inprogress():
                return self._response(await self._decide(poll, turn, 0.0 if busy else HOLD_SECONDS))
        finally:
            if self._newest.get(poll.instance_id) is turn:
                del self._newest[poll.instance_id]

    async def _decide(self, poll: Poll, turn: object, hold: float) -> Answer:
        loop = asyncio.get_running_loop()
        until = loop.time() + hold
        async with self._changed:
            while self._newest.get(poll.instance_id) is turn:
                answer = self._plan.answer(poll, time.time())
                if not answer.quiet or loop.time() >= until:
                    return answer
                try:
                    async with asyncio.timeout_at(until):
                        await self._changed.wait()
                except TimeoutError:
                    # Asked once more: what is decided here must be what is told.
                    continue
        return Answer()

    async def _announce(self) -> None:
        """Wakes the polls that are held back, if anything has changed that can matter to them."""
        if self.ledger.revision == self._announced:
            return
        self._announced = self.ledger.revision
        async with self._changed:
            self._changed.notify_all()

    def _poll(self, request: pb.PollWorkRequest) -> Poll:
        ours = request.progress if request.coordinator_epoch == self.epoch else ()
        return Poll(
            request.instance_id,
            request.epoch,
            request.policy_version,
            request.room,
            tuple(Progress(each.lease, each.tokens, each.finished, each.returned) for each in ours),
            request.serving,
        )

    def _response(self, answer: Answer) -> pb.PollWorkResponse:
        return pb.PollWorkResponse(
            coordinator_epoch=self.epoch,
            items=[self._item(lease) for lease in answer.leases],
            halt=answer.halt,
            revoked=answer.revoked,
            sleep=answer.sleep,
            poll_steps=self._config.poll_steps,
            halted_at=answer.halted_at,
        )

    def _item(self, lease: Lease) -> pb.PregenerationItem:
        item, pool = lease.item, self.ledger.pool_of(lease)
        assert pool is not None, "an item that has just been leased is in its pool"
        return pb.PregenerationItem(
            lease=lease.number,
            run_id=lease.run_id,
            prompt_id=item.group.prompt_id,
            slot=item.slot,
            step=lease.step,
            seed=item.seed,
            prompt_token_ids=item.group.prompt_token_ids,
            sampling=item.group.sampling,
            exactness=pool.hint.exactness,
        )


def _check_run(request: pb.SetRunRequest) -> list[Violation]:
    violations = [] if request.run_id else [Violation("run_id", "is empty")]
    if not request.closed and request.phase not in _PHASES:
        violations.append(Violation("phase", f"is {request.phase}; must be ROLLOUT, UPDATE or APPLYING"))
    return violations


def _check_hint(request: pb.PutHintRequest) -> list[Violation]:
    violations = [Violation(name, "is empty") for name in ("run_id", "hint_id") if not getattr(request, name)]
    seen: set[str] = set()
    for number, group in enumerate(request.groups):
        if not group.seeds:
            violations.append(Violation(f"groups[{number}].seeds", "is empty; there is one for each slot"))
        if not group.prompt_token_ids:
            violations.append(Violation(f"groups[{number}].prompt_token_ids", "is empty"))
        if group.prompt_id in seen:
            violations.append(Violation(f"groups[{number}].prompt_id", "is that of an earlier group"))
        seen.add(group.prompt_id)
    return violations
