"""The scheduler of a gateway, wired as in a term, with links and a journal that only record."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry

from paceline.internal.v1 import generation_pb2 as pb
from paceline.v1 import rollout_pb2, sample_pb2
from services.contracts.gateway_keys import BatchKey
from services.gateway.feeds.learner import EndedSingles
from services.gateway.journal.record import BatchHead, BatchRecord, JournalWrite, collect, settle
from services.gateway.journal.writer import JournalBacklog
from services.gateway.metrics import GatewayMetrics
from services.gateway.scheduler.active_batches import ActiveBatches, RunningBatch
from services.gateway.scheduler.estimator import WorkEstimator
from services.gateway.scheduler.instance_events import InstanceEvents
from services.gateway.scheduler.placement import InstanceSlots
from services.gateway.scheduler.placer import Placer
from services.gateway.scheduler.scheduler import Scheduler
from services.gateway.scheduler.turns import Pace, Turns
from services.gateway.scheduler.work_link import Attempt, WorkLink
from services.gateway.state.fleet_health import FleetHealth
from services.gateway.state.rollout_batch import RolloutBatch
from services.gateway.state.sample import BatchGroup, GatewaySample
from services.platform.redis.decision_log import DecisionRecord
from services.platform.redis.registry import InstanceRecord
from services.platform.tasks import ExponentialBackoff
from tests.support.token_columns import columns

VERSION = 7
STOP = sample_pb2.FINISH_REASON_STOP
LONG = 3600.0
"""Seconds of a timer that must not fire."""


class RecordingLink(WorkLink):
    """A work stream that records what is sent instead of sending it."""

    def __init__(
        self,
        instance_id: str,
        epoch: int,
        room: int,
        refusal_pause: float,
        receive: Any,
        backlog: JournalBacklog,
    ) -> None:
        slots = InstanceSlots(instance_id, VERSION, room, 0.0)
        stub: Any = None
        super().__init__(
            instance_id,
            epoch,
            slots,
            ExponentialBackoff(refusal_pause, refusal_pause),
            stub,
            receive,
            Pace(),
            backlog,
        )
        self.items: list[pb.WorkItem] = []
        self.claimed: dict[int, str] = {}
        self.aborted: list[int] = []

    def give(self, attempt: Attempt, item: pb.WorkItem) -> None:
        super().give(attempt, item)
        self.items.append(item)

    def claim(self, attempt: Attempt, handle: int) -> None:
        super().claim(attempt, handle)
        self.claimed[handle] = attempt.migration_id

    def abort(self, handle: int) -> None:
        super().abort(handle)
        self.aborted.append(handle)


class RecordingJournal:
    """Stands for the journal writer: `write` does at once what that does in the background."""

    def __init__(self) -> None:
        self.touched: dict[BatchKey, RolloutBatch] = {}
        self.records: dict[BatchKey, BatchRecord] = {}

    def touch(self, batch: RolloutBatch) -> None:
        self.touched[batch.key] = batch

    def write(self, scheduler: Scheduler) -> list[JournalWrite]:
        touched, self.touched = self.touched, {}
        writes = []
        for key, batch in touched.items():
            record = self.records.setdefault(key, record_of(batch))
            write = collect(batch, record)
            settle(batch, record, write, [])
            if write.ended:
                scheduler.journaled(key, record.safe)
            writes.append(write)
        return writes


class SchedulerParts:
    """All parts, and instances to play with. Times are in seconds."""

    def __init__(
        self,
        *,
        abort_seconds: float = LONG,
        claim_wait: float = LONG,
        refusal_pause: float = LONG,
        max_samples: int = 1000,
        turn_seconds: float = LONG,
        fleet: FleetHealth | None = None,
    ) -> None:
        self.registry = CollectorRegistry()
        self.metrics = GatewayMetrics(self.registry)
        self.fleet = fleet or FleetHealth()
        if fleet is None:
            self.fleet.publish(VERSION, recorded=False, now=0.0)
        self.journal = RecordingJournal()
        writer: Any = self.journal
        self.batches = ActiveBatches(self.metrics, max_samples)
        self.estimator = WorkEstimator(draft_cost=0.15)
        self.backlog = JournalBacklog(1000, self.metrics)
        self.placer = Placer(
            self.batches, self.estimator, self.fleet, self.metrics, self.backlog, 1.0, turn_seconds
        )
        self.recorded: list[DecisionRecord] = []
        turns = Turns(turn_seconds)
        self.scheduler = Scheduler(
            self.batches,
            self.estimator,
            self.placer,
            writer,
            turns,
            self.metrics,
            None,
            None,
            EndedSingles(),
            self.recorded.append,
            abort_seconds,
        )
        self.events = InstanceEvents(
            self.batches,
            self.estimator,
            self.placer,
            self.scheduler,
            turns,
            self.fleet,
            self.metrics,
            claim_wait,
        )
        self._refusal_pause = refusal_pause
        self._records: dict[str, InstanceRecord] = {}

    def join(self, instance_id: str, address: str = "") -> None:
        """Let an instance serve, without a link."""
        record = InstanceRecord(
            "generation", instance_id, epoch=1, address=address, state="serving", policy_version=VERSION
        )
        self._records[instance_id] = record
        self.fleet.observe(self._records, 0.0)
        assert self.fleet.confirm(instance_id, 1, VERSION, 0.0, updated=False)

    def link(self, instance_id: str, room: int = 8) -> RecordingLink:
        """Let an instance join, and give it work."""
        self.join(instance_id)
        link = RecordingLink(instance_id, 1, room, self._refusal_pause, self.events.responded, self.backlog)
        self.events.link_up(link)
        return link

    def metric(self, name: str, **labels: str) -> float:
        return self.shown(name, **labels) or 0.0

    def shown(self, name: str, **labels: str) -> float | None:
        """Return the value of a series, None if there is none."""
        return self.registry.get_sample_value(f"paceline_gateway_{name}", labels)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds, looking whenever a sample has made progress."""
        async with asyncio.timeout(60):
            while not condition():
                self.batches.progress.clear()
                await self.batches.progress.wait()


def a_batch(
    samples: int = 1, *, max_attempts: int = 3, seconds: float = LONG, batch_id: str = "b", **fields: Any
) -> RolloutBatch:
    """Return a batch of one group, accepted now."""
    now = time.time()
    return RolloutBatch(
        key=("run", batch_id),
        policy_version=VERSION,
        groups=[BatchGroup("p", [1, 2], sample_pb2.SamplingParams(max_tokens=50), count=samples)],
        exactness=sample_pb2.Exactness(level=sample_pb2.EXACTNESS_LEVEL_EXACT),
        samples=[GatewaySample(index, 0, index, 100 + index) for index in range(samples)],
        accepted_at=now,
        deadline_at=now + seconds,
        max_attempts=max_attempts,
        **fields,
    )


def record_of(batch: RolloutBatch, term: int = 1) -> BatchRecord:
    """Return the record of a batch of which nothing has ended yet."""
    request = rollout_pb2.SubmitRolloutsRequest(run_id=batch.key[0], batch_id=batch.key[1])
    for number, group in enumerate(batch.groups):
        samples = sum(sample.group == number for sample in batch.samples)
        request.groups.add(prompt_id=group.prompt_id, samples=samples)
    return BatchRecord(request, BatchHead("digest", batch.accepted_at, len(batch.samples), None), term)


async def turn() -> None:
    """Let what is due on the event loop happen."""
    for _ in range(3):
        await asyncio.sleep(0)


def tokens(handle: int, *values: int) -> pb.WorkResponse:
    """Return a message with new tokens of a sample, each with log-probability -1."""
    response = pb.WorkResponse()
    response.deltas.add(handle=handle, tokens=columns(values, [-1.0] * len(values)))
    return response


def finished(handle: int, reason: sample_pb2.FinishReason = STOP, resume_on: str = "") -> pb.WorkResponse:
    """Return a message with the end of a sample."""
    response = pb.WorkResponse()
    response.finished.add(handle=handle, finish_reason=reason, resume_on=resume_on)
    return response


def refused(
    handle: int, code: int, field: str = "", message: str = "no", reason: str = ""
) -> pb.WorkResponse:
    """Return a message with the refusal of a sample."""
    response = pb.WorkResponse()
    response.refused.add(handle=handle, code=code, field=field, message=message, reason=reason)
    return response


def moved(handle: int, receiver: str, response_tokens: int) -> pb.WorkResponse:
    """Return a message with the move of a sample by KV."""
    response = pb.WorkResponse()
    response.moved.add(
        handle=handle, instance_id=receiver, migration_id="m1", response_tokens=response_tokens
    )
    return response


def texts(running: RunningBatch) -> Sequence[list[int]]:
    """Return the tokens of every sample."""
    return [list(sample.tokens) for sample in running.batch.samples]
