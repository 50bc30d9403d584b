"""Submit batches: accept or open one, add groups, close it, cancel its samples, and hint at the next.

A repeated request gets the same answer. Groups are added to an open batch while its samples already run, until a
trainer closes it, its deadline passes, or it has been idle for too long.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import ParamSpec, TypeVar

import structlog

from paceline.errors import Violation
from paceline.v1 import rollout_pb2 as pb
from services.contracts.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    ServiceError,
    Unavailable,
)
from services.contracts.gateway_keys import BatchKey
from services.gateway.api.bubble_coordinator import BubbleLink
from services.gateway.api.hints import Hinting, hinted_batch
from services.gateway.api.intake import BatchRecovery, FleetChecks, check_batch_name, not_in_work
from services.gateway.api.validation import (
    ENOUGH,
    as_submission,
    check_groups,
    check_submit,
    first_difference,
)
from services.gateway.journal.fenced_records import Leniences
from services.gateway.journal.journal import BatchGone, Journal, cancelled_indexes, serialised
from services.gateway.journal.record import BatchHead, BatchRecord, RecordedBatches
from services.gateway.journal.writer import RedisHeadroom
from services.gateway.metrics import GatewayMetrics
from services.gateway.scheduler.active_batches import ActiveBatches, RunningBatch
from services.gateway.scheduler.scheduler import Scheduler
from services.gateway.state.messages import BatchBuilder, build_groups
from services.platform.memory import pause_collection
from services.platform.redis.connection import OUTAGES

log = structlog.get_logger(__name__)

OPENED = "open:"
"""Prefix of the fingerprints of batches that were opened."""
R = TypeVar("R")
P = ParamSpec("P")
# Most bytes of the groups of one open batch: if Redis loses them, they are written again in one command.
_MOST_GROUP_BYTES = 64 << 20
# Most seconds between two checks for idle batches.
_IDLE_CHECK_SECONDS = 5.0
# Most samples and bytes of a request that is processed on the event loop, in under 2 ms. Larger ones use a thread.
_FEW_SAMPLES, _FEW_BYTES = 256, 64 << 10


@dataclass(eq=False)
class Submissions:
    """Submitted and opened batches of all runs, for one term of leadership."""

    checks: FleetChecks
    journal: Journal
    records: RecordedBatches
    headroom: RedisHeadroom
    batches: ActiveBatches
    scheduler: Scheduler
    leniences: Leniences
    builder: BatchBuilder
    recovery: BatchRecovery
    hinting: Hinting
    bubbles: BubbleLink
    open_batches: OpenBatches

    async def submit(self, request: pb.SubmitRolloutsRequest) -> pb.SubmitRolloutsResponse:
        """Accept a batch. A repeated request gets the same answer, whatever has happened since."""
        record, known = await self._accept(request)
        return pb.SubmitRolloutsResponse(
            batch_id=request.batch_id, samples=record.total, already_submitted=known
        )

    async def open(self, request: pb.OpenBatchRequest) -> pb.OpenBatchResponse:
        """Open a batch. A repeated request gets the same answer, whatever has happened since."""
        _, known = await self._accept(as_submission(request), opens=True)
        return pb.OpenBatchResponse(batch_id=request.batch_id, already_opened=known)

    async def _accept(
        self, request: pb.SubmitRolloutsRequest, *, opens: bool = False
    ) -> tuple[BatchRecord, bool]:
        """Return the record of a batch, and True if it was known."""
        key = (request.run_id, request.batch_id)
        check_batch_name(key)
        payload, fingerprint = await serialised(request)
        if opens:
            fingerprint = f"{OPENED}{fingerprint}"
        async with self.recovery.lock(key):
            known = await self.recovery.take_up(key)
            if known is not None and not known.is_acknowledged:
                await _check_same(known, request, fingerprint)
                self.batches.use(key)
                return known, True
            total = sum(group.samples for group in request.groups)
            small = total <= _FEW_SAMPLES and len(payload) <= _FEW_BYTES
            await self._check(request, small=small, opens=opens)
            account, most_tokens = self.checks.account(), 0
            if account is not None:
                most_tokens = await _process(small, account.tokens_of, request.groups, request.sampling)
            with self.batches.reserve(total, account, most_tokens):
                pause_collection(self.batches.unfinished)
                accepted_at = time.time()
                lenience = await self.leniences.choose(request.run_id, request.exactness)
                head = BatchHead(fingerprint, accepted_at, total, lenience, opens, account)
                record = await _process(small, BatchRecord, request, head, self.journal.term)
                if known is not None:
                    # Fully acknowledged before: a restarted trainer resubmits the batch.
                    record.follow(known)
                    await self.journal.discard(key)
                    self.records.forget(key)
                coverage, created = await asyncio.gather(
                    self.bubbles.coverage(request.run_id, request.step), self.journal.create(record, payload)
                )
                if not created:
                    raise Unavailable(f"batch {'/'.join(key)} was recorded by another gateway; try again")
                batch = await _process(
                    small,
                    self.builder.from_submission,
                    request,
                    accepted_at,
                    lenience,
                    opened=opens,
                    account=account,
                )
            self.records.add(record)
            self.hinting.begin(batch)
            self.recovery.begin(batch, coverage=coverage)
        log.info("batch_accepted", batch=key, samples=total, version=request.policy_version, open=opens)
        return record, False

    async def _check(self, request: pb.SubmitRolloutsRequest, *, small: bool, opens: bool) -> None:
        """Raise a ServiceError if a new batch is malformed, or has no room now."""
        self.checks.check_request(request)
        limits, most_calls = self.checks.limits(), self.builder.max_calls
        if violations := await _process(
            small, check_submit, request, limits, opens=opens, most_calls=most_calls
        ):
            raise InvalidArgument(violations)
        # Another version may have been published since.
        self.checks.check_request(request)
        self.headroom.check()
        if opens:
            self.batches.check_batches()

    async def hint(self, request: pb.HintNextBatchRequest) -> int:
        """Keep a hint, checked like the batch that it announces; return the number of samples to pre-generate.

        Returns 0, and raises no error, if the step has begun, is too far ahead, or there is no room.
        """
        announced = await asyncio.to_thread(hinted_batch, request)
        check_batch_name((announced.run_id, announced.batch_id))
        if violations := await asyncio.to_thread(check_submit, announced, self.checks.limits()):
            raise InvalidArgument(violations)
        return await self.hinting.hint(request)

    async def cancel(self, request: pb.CancelRolloutsRequest) -> int:
        """End samples of a batch; return the number that were not finished or cancelled before.

        If none is named, an open batch is closed first, because its recorded cancellation would also cancel samples
        that are added later.
        """
        key = (request.run_id, request.batch_id)
        record = await self.recovery.known(key)
        _check_samples(record, request)
        if record.open and not request.samples:
            await self.open_batches.close(key)
        running = self.batches.by_key.get(key)
        if running is None:
            return 0
        record.cancels.append(request)
        # A batch that Redis has lost is recorded again by its next write, with its cancellations.
        with contextlib.suppress(BatchGone):
            await self.journal.cancel(request)
        if self.batches.by_key.get(key) is not running:
            return 0
        indexes = cancelled_indexes(record, request.samples)
        cancelled = await self.scheduler.cancel(running, indexes, request.keep_partial)
        log.info("cancelled", batch=key, samples=cancelled, keep_partial=request.keep_partial)
        return cancelled


async def _check_same(known: BatchRecord, request: pb.SubmitRolloutsRequest, fingerprint: str) -> None:
    """Raise AlreadyExists, with the first field that differs, if another batch has the same name."""
    if known.head.fingerprint == fingerprint:
        return
    name, was_opened = "/".join(known.key), known.head.fingerprint.startswith(OPENED)
    if was_opened != fingerprint.startswith(OPENED):
        differs, how = "", "it was opened" if was_opened else "it was submitted whole"
    elif known.request is None:
        differs, how = "", "it has another content"
    else:
        # Groups of an open batch are added after it was opened.
        skipped = ["groups"] if was_opened else []
        differs, how = await asyncio.to_thread(first_difference, known.request, request, skipped)
        how = how or "it has another content"
    message = f"batch {name} exists already, and differs: {f'{differs} {how}'.strip()}"
    message += (
        "; submit it unchanged, under another step or batch id, or end the run first (EndRun, run.end())"
    )
    raise AlreadyExists("batch", name, message, field=differs)


def _check_samples(record: BatchRecord, request: pb.CancelRolloutsRequest) -> None:
    unknown = (
        Violation(f"samples[{number}]", f"prompt {each.prompt_id!r} slot {each.slot} is not in the batch")
        for number, each in enumerate(request.samples)
        if record.index_of(each.prompt_id, each.slot) is None
    )
    if violations := list(islice(unknown, ENOUGH)):
        raise InvalidArgument(violations)


async def _process(small: bool, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function that loops over a request: directly if the request is `small`, else in a thread."""
    return function(*args, **kwargs) if small else await asyncio.to_thread(function, *args, **kwargs)


@dataclass(eq=False)
class OpenBatches:
    """Additions to open batches, and their end, for one term of leadership.

    A batch has at most `most_samples` samples, and is closed when no trainer has used it for `idle_seconds`.
    """

    checks: FleetChecks
    journal: Journal
    headroom: RedisHeadroom
    batches: ActiveBatches
    scheduler: Scheduler
    recovery: BatchRecovery
    metrics: GatewayMetrics
    most_samples: int
    idle_seconds: float

    async def add(self, request: pb.AddSamplesRequest) -> pb.AddSamplesResponse:
        """Add the groups that the batch does not have, and return their number of samples."""
        key = (request.run_id, request.batch_id)
        check_batch_name(key)
        async with self.recovery.lock(key):
            record = await self._known(key)
            self.batches.use(key)
            if record.request is None:
                raise _batch_closed(key)
            groups = _new_groups(record, request)
            added = sum(group.samples for group in groups)
            if groups:
                running = await self._may_add(record)
                if violations := await asyncio.to_thread(
                    check_groups, request.groups, record.request, self.checks.limits()
                ):
                    raise InvalidArgument(violations)
                await self._add(running, record, groups, added)
        if added:
            log.info("samples_added", batch=key, samples=added, total=record.total)
        return pb.AddSamplesResponse(added=added, total=record.total)

    async def close(self, key: BatchKey) -> pb.CloseBatchResponse:
        """Close a batch, so that nothing can be added to it."""
        check_batch_name(key)
        async with self.recovery.lock(key):
            record = await self._known(key)
            was_open = record.open
            await self._close(record)
        return pb.CloseBatchResponse(total=record.total, already_closed=not was_open)

    async def run(self) -> None:
        """Close batches whose trainer has vanished, until cancelled."""
        while True:
            await asyncio.sleep(min(_IDLE_CHECK_SECONDS, self.idle_seconds / 4))
            for running in list(self.batches.by_key.values()):
                cause = self._over(running)
                if cause:
                    await self._give_up(running, cause)

    async def _known(self, key: BatchKey) -> BatchRecord:
        record = await self.recovery.take_up(key)
        if record is None:
            raise NotFound("batch", "/".join(key))
        return record

    async def _may_add(self, record: BatchRecord) -> RunningBatch:
        """Return an open batch that is in work; ServiceError if nothing can be added to it."""
        running = self.batches.by_key.get(record.key)
        over = running is not None and running.batch.deadline_at <= time.time()
        if record.open and running is not None and over:
            await self._give_up(running, "deadline", locked=True)
        if not record.open:
            raise _batch_closed(record.key)
        if running is None or over:
            raise not_in_work(record.key)
        self._check_addition(running)
        return running

    async def _add(
        self, running: RunningBatch, record: BatchRecord, groups: Sequence[pb.Group], samples: int
    ) -> None:
        request = record.request
        assert request is not None, "it is open"
        self._check_addition(running)
        self.headroom.check()
        payload = await asyncio.to_thread(_serialise_groups, groups)
        self._check_size(record, samples, len(payload))
        # The samples count for the account that opened the batch; this notes the limits of the current caller.
        self.checks.account()
        account, most_tokens = running.batch.account, 0
        if account is not None:
            most_tokens = await asyncio.to_thread(account.tokens_of, groups, request.sampling)
        with self.batches.reserve(samples, account, most_tokens):
            pause_collection(self.batches.unfinished)
            made = await asyncio.to_thread(
                build_groups,
                request,
                groups,
                running.batch.exactness,
                len(request.groups),
                record.total,
                account,
            )
            await self.journal.add(record, payload, samples)
        # No await from here on: the record must agree with the journal.
        record.extend(groups, len(payload))
        if running.dropped:
            raise not_in_work(record.key)
        self.scheduler.extend(running, *made)

    def _check_addition(self, running: RunningBatch) -> None:
        batch = running.batch
        self.checks.check_batch(
            batch.key, batch.policy_version, batch.max_staleness, regenerates=batch.regenerates
        )

    def _check_size(self, record: BatchRecord, samples: int, nbytes: int) -> None:
        if record.total + samples > self.most_samples:
            found = f"{record.total} samples; with {samples} more it would exceed {self.most_samples}"
        elif record.request_bytes + nbytes > _MOST_GROUP_BYTES:
            most = _MOST_GROUP_BYTES
            found = f"{record.request_bytes} bytes of groups; with {nbytes} more it would exceed {most}"
        else:
            return
        message = f"batch {'/'.join(record.key)} has {found}: close it and open another"
        raise ResourceExhausted("batch_size", message)

    async def _close(self, record: BatchRecord) -> None:
        """Close a batch whose lock is held."""
        if not record.open:
            return
        await self.journal.close(record, time.time())
        record.close()
        running = self.batches.by_key.get(record.key)
        if running is not None:
            self.scheduler.close(running)
        log.info("batch_closed", batch=record.key, samples=record.total)

    def _over(self, running: RunningBatch) -> str:
        """Return the cause to close an open batch; empty: there is none."""
        if not running.batch.open:
            return ""
        if running.batch.deadline_at <= time.time():
            return "deadline"
        idle = time.monotonic() - running.used_at
        return "idle" if not running.readers and idle > self.idle_seconds else ""

    async def _give_up(self, running: RunningBatch, cause: str, *, locked: bool = False) -> None:
        key = running.batch.key
        log.warning("open_batch_given_up", batch=key, cause=cause, samples=len(running.batch.samples))
        try:
            if locked:
                await self._close(await self._known(key))
            else:
                await self.close(key)
        except (*OUTAGES, ServiceError) as error:
            # The next check tries again.
            log.warning("open_batch_not_closed", batch=key, error=str(error))
            return
        self.metrics.closed_batches.labels(cause).inc()


def _new_groups(record: BatchRecord, request: pb.AddSamplesRequest) -> list[pb.Group]:
    try:
        return record.new_groups(request.groups)
    except ValueError as differs:
        (number,) = differs.args
        prompt = request.groups[number].prompt_id
        message = f"groups[{number}]: prompt {prompt!r} is in the batch with another content"
        raise AlreadyExists("group", prompt, message) from None


def _serialise_groups(groups: Sequence[pb.Group]) -> bytes:
    return pb.SubmitRolloutsRequest(groups=groups).SerializeToString(deterministic=True)


def _batch_closed(key: BatchKey) -> FailedPrecondition:
    run_id, batch_id = key
    message = f"batch {run_id}/{batch_id} is closed; open another to add groups"
    return FailedPrecondition("BATCH_CLOSED", message, run_id=run_id, batch_id=batch_id)
