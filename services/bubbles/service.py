"""Servicer of BubbleService: it answers gateway and instances by the plan, and holds back polls without an answer.

It also records in the decision log the times in which instances pre-generated.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import grpc

from paceline.errors import Violation
from paceline.internal.v1 import bubble_pb2 as pb
from paceline.internal.v1 import bubble_pb2_grpc as rpc
from paceline.times import timestamp
from services.bubbles.config import BubblesConfig
from services.bubbles.ledger import BubbleLedger, TaskLease, is_running
from services.bubbles.plan import HeldPolls, PregenerationPlan, WorkAnswer
from services.contracts.errors import InvalidArgument
from services.platform.observability.metrics import MetricSet, counter, gauge
from services.platform.redis.decision_log import DecisionRecord
from services.platform.redis.registry import INSTANCES, InstanceRecord, Registry


class BubbleMetrics(MetricSet, prefix="paceline_bubbles_"):
    """All metrics of the coordinator."""

    leases = counter(
        "leases_total",
        "Leases by event: leased; finished; returned; revoked (no longer wanted); expired (instance silent or "
        "gone); replaced (instance restarted); unknown (to the instance).",
        "event",
    )
    tokens = counter("pregenerated_tokens_total", "Tokens pre-generated, as instances report.")
    running = gauge("leased_tasks", "Pre-generation tasks that instances have.")
    open = gauge("open_tasks", "Unfinished pre-generation tasks.")
    runs = gauge("runs", "Runs known.")
    instances = gauge("instances", "Instances that share the work.")
    polls = gauge("held_polls", "Polls held back for lack of work.")

    def count(self, ledger: BubbleLedger) -> None:
        """Count the events of leases since the last call."""
        tally, ledger.tally = ledger.tally, type(ledger.tally)()
        self.tokens.inc(tally.pop("tokens", 0))
        for event, count in tally.items():
            self.leases.labels(event).inc(count)

    def show(self, ledger: BubbleLedger, now: float) -> None:
        """Publish the state of the ledger."""
        pools = [pool for run in ledger.runs.values() for pool in run.pools.values() if pool.wanted]
        self.running.set(sum(pool.leased for pool in pools))
        self.open.set(sum(pool.open for pool in pools))
        self.runs.set(len(ledger.runs))
        self.instances.set(ledger.members(now))


Context = grpc.aio.ServicerContext[Any, Any]

HOLD_SECONDS = 1.0
"""Longest time for which a poll without an answer is held back."""
KIND = "pregeneration"
"""Kind of the decision-log entries of filled times."""
MOST = 256
"""Most spans in one entry."""
_TICK_SECONDS = 1.0
# Instances write their records at this interval.
_REGISTRY_SECONDS = 1.0
_PHASES = (pb.RUN_PHASE_ROLLOUT, pb.RUN_PHASE_UPDATE, pb.RUN_PHASE_APPLYING)
# A span that begins this soon after the previous one ended continues it.
_PAUSE = 0.05
# Longer spans are recorded in parts.
_LONGEST = 10.0


class FilledSpan(NamedTuple):
    """Time in which an instance had tasks to pre-generate."""

    instance_id: str
    begin: float
    end: float


@dataclass(slots=True)
class _OpenSpan:
    begin: float
    last_poll: float
    end: float | None = None
    """Set when no task was left; the span may still continue."""


class FilledTime:
    """Spans of all instances: at most one open span for each, and closed ones until `take`.

    The span of an instance that does not poll for `silence` seconds ended at its last poll.
    """

    def __init__(self, silence: float) -> None:
        self._silence = silence
        self._open: dict[str, _OpenSpan] = {}
        self._closed: list[FilledSpan] = []

    def note(self, instance_id: str, busy: bool, now: float) -> None:
        """Record whether an instance pre-generates from now on."""
        span = self._open.get(instance_id)
        if span is not None and span.end is not None and now - span.end > _PAUSE:
            self._close(instance_id, span.end)
            span = None
        if span is None:
            if busy:
                self._open[instance_id] = _OpenSpan(now, now)
            return
        span.last_poll = now
        if busy:
            span.end = None
        elif span.end is None:
            span.end = now

    def take(self, now: float) -> list[FilledSpan]:
        """Return the spans that are over, and the first parts of very long ones."""
        for instance_id, span in list(self._open.items()):
            if span.end is not None and now - span.end > _PAUSE:
                self._close(instance_id, span.end)
            elif now - span.last_poll > self._silence:
                self._close(instance_id, span.last_poll)
            elif now - span.begin > _LONGEST:
                self._closed.append(FilledSpan(instance_id, span.begin, span.last_poll))
                span.begin = span.last_poll
        taken, self._closed = self._closed, []
        return taken

    def _close(self, instance_id: str, end: float) -> None:
        span = self._open.pop(instance_id)
        self._closed.append(FilledSpan(instance_id, span.begin, end))


def filled_records(spans: Sequence[FilledSpan]) -> list[DecisionRecord]:
    """Return the decision-log entries of these spans, each of at most `MOST`."""
    return [_record(spans[first : first + MOST]) for first in range(0, len(spans), MOST)]


def _record(spans: Sequence[FilledSpan]) -> DecisionRecord:
    seconds = sum(span.end - span.begin for span in spans)
    instances = len({span.instance_id for span in spans})
    words = f"{instances} instances pre-generated for {seconds:.1f} s in all"
    listed = [[span.instance_id, round(span.begin, 3), round(span.end, 3)] for span in spans]
    return DecisionRecord(KIND, words, 0.0, {"filled": listed}, max(span.end for span in spans))


class BubbleService(rpc.BubbleServiceServicer):
    """One coordinator process.

    Its epoch is its start time in nanoseconds, and its lease numbers count up from there, so that no two processes
    give out the same number.
    """

    def __init__(
        self, config: BubblesConfig, metrics: BubbleMetrics, record: Callable[[DecisionRecord], None]
    ) -> None:
        """`record` writes to the decision log."""
        self.epoch = time.time_ns()
        self.ledger = BubbleLedger(config, self.epoch + 1)
        self._plan = PregenerationPlan(self.ledger)
        self._config = config
        self._metrics = metrics
        self._announced = 0
        self._filled = FilledTime(config.lease_seconds)
        self._record = record
        # Polls that are held back, by kind, and the events that wake them.
        self._held = HeldPolls()
        self._wakers: dict[str, tuple[pb.PollWorkRequest, asyncio.Event]] = {}
        # The newest poll of each instance: an older one that is still held is answered with nothing.
        self._newest: dict[str, object] = {}

    async def run(self) -> None:
        """Let leases of silent instances expire, until cancelled."""
        while True:
            await asyncio.sleep(min(_TICK_SECONDS, self._config.lease_seconds / 4))
            now = time.time()
            self.ledger.expire(now)
            self._metrics.count(self.ledger)
            self._metrics.show(self.ledger, now)
            self._announce()
            for entry in filled_records(self._filled.take(now)):
                self._record(entry)

    async def watch_instances(self, registry: Registry) -> NoReturn:
        """Report the registered instances, and their number of step samples, to the ledger until cancelled.

        In an outage of the registry nothing is reported: the last known state is the best guess.
        """

        async def look(records: dict[str, InstanceRecord] | None) -> None:
            if records is not None:
                self.ledger.set_alive({instance_id: each.samples for instance_id, each in records.items()})

        await registry.watch(INSTANCES, _REGISTRY_SECONDS, look)

    async def SetRun(self, request: pb.SetRunRequest, context: Context) -> pb.SetRunResponse:
        """Record the status of a run; the response names the hints that are missing."""
        if violations := _check_run(request):
            raise InvalidArgument(violations)
        missing: list[str] = []
        if request.closed:
            self.ledger.close_run(request.run_id)
        else:
            missing = self.ledger.set_run(request, time.time())
        self._announce()
        return pb.SetRunResponse(missing_hint_ids=missing)

    async def PutHint(self, request: pb.PutHintRequest, context: Context) -> pb.PutHintResponse:
        """Record the samples of a coming step."""
        if violations := _check_hint(request):
            raise InvalidArgument(violations)
        samples = self.ledger.put_hint(request, time.time())
        self._announce()
        return pb.PutHintResponse(samples=samples)

    async def GetCoverage(self, request: pb.GetCoverageRequest, context: Context) -> pb.GetCoverageResponse:
        """Return the number of tokens of each sample of a step; empty for an unknown step."""
        response = pb.GetCoverageResponse()
        for task in self.ledger.coverage(request.run_id, request.step):
            prompt_id, slot = task.key
            response.slots.add(prompt_id=prompt_id, slot=slot, tokens=task.covered, finished=task.finished)
        return response

    async def PollWork(self, request: pb.PollWorkRequest, context: Context) -> pb.PollWorkResponse:
        """Answer an instance with running tasks at once, and an idle one once there is an answer for it."""
        if not request.instance_id:
            raise InvalidArgument([Violation("instance_id", "is empty")])
        # Leases of another coordinator process keep the instance busy as well.
        busy = any(map(is_running, request.progress))
        poll, turn = request, object()
        if poll.coordinator_epoch != self.epoch:
            poll.ClearField("progress")
        self._newest[poll.instance_id] = turn
        self._wake(poll.instance_id)
        self.ledger.report(poll, time.time())
        self._filled.note(poll.instance_id, busy, time.time())
        self._announce()
        try:
            with self._metrics.polls.track_inprogress():
                answer = await self._decide(poll, turn, 0.0 if busy else HOLD_SECONDS)
            # Before the response: metrics read after it must include its leases and the reported events.
            self._metrics.count(self.ledger)
            if answer.leases:
                self._filled.note(poll.instance_id, True, time.time())
            return self._response(answer)
        finally:
            if self._newest.get(poll.instance_id) is turn:
                del self._newest[poll.instance_id]
            # The next poll may take what this one has left.
            self._wake_first()

    async def _decide(self, poll: pb.PollWorkRequest, turn: object, hold: float) -> WorkAnswer:
        loop = asyncio.get_running_loop()
        until = loop.time() + hold
        while self._newest.get(poll.instance_id) is turn:
            answer = self._plan.answer(poll, time.time())
            if not answer.quiet or loop.time() >= until:
                return answer
            # After the timeout it decides once more, so that the response is the latest decision.
            await self._hold(poll, until)
        return WorkAnswer()

    async def _hold(self, poll: pb.PollWorkRequest, until: float) -> None:
        """Hold a poll back until it is woken, or until a loop time."""
        name, woken = poll.instance_id, asyncio.Event()
        self._wakers[name] = (poll, woken)
        self._queue(poll)
        try:
            async with asyncio.timeout_at(until):
                await woken.wait()
        except TimeoutError:
            pass
        finally:
            if self._wakers.get(name, (None, None))[1] is woken:
                self._wake(name)

    def _queue(self, poll: pb.PollWorkRequest) -> None:
        if (kind := self._plan.kind(poll)) is not None:
            self._held.hold(poll.instance_id, kind)

    def _announce(self) -> None:
        """Wake the held polls that have an answer now, if the ledger has changed."""
        if self.ledger.revision == self._announced:
            return
        self._announced = self.ledger.revision
        for name in self.ledger.recounted:
            if name in self._held:
                self._queue(self._wakers[name][0])
        self.ledger.recounted.clear()
        self._wake_first()

    def _wake_first(self) -> None:
        """Wake the first poll of each kind that has an answer; the next is woken once it was answered."""
        now = time.time()
        for name in self._held.first(lambda kind: self._plan.has_answer(kind, now)):
            self._wake(name)

    def _wake(self, name: str) -> None:
        """Let the held poll of an instance, if there is one, decide again."""
        self._held.leave(name)
        held = self._wakers.pop(name, None)
        if held is not None:
            held[1].set()

    def _response(self, answer: WorkAnswer) -> pb.PollWorkResponse:
        return pb.PollWorkResponse(
            coordinator_epoch=self.epoch,
            tasks=[self._task(lease) for lease in answer.leases],
            halt=answer.halt,
            revoked=answer.revoked,
            sleep=answer.sleep,
            poll_steps=self._config.poll_steps,
            halted_at=timestamp(answer.halted_at) if answer.halted_at else None,
        )

    def _task(self, lease: TaskLease) -> pb.PregenerationTask:
        task, pool = lease.task, self.ledger.pool_of(lease)
        assert pool is not None, "a task that has just been leased is in its pool"
        return pb.PregenerationTask(
            lease=lease.number,
            run_id=lease.run_id,
            prompt_id=task.group.prompt_id,
            slot=task.slot,
            step=lease.step,
            seed=task.seed,
            prompt_token_ids=task.group.prompt_token_ids,
            sampling=task.group.sampling,
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
            violations.append(Violation(f"groups[{number}].prompt_id", "repeats an earlier group's"))
        seen.add(group.prompt_id)
    return violations
