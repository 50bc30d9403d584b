"""Open batches: groups are added to them while their samples already run, until they are closed."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

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
from services.gateway.batches.admission import check_groups, check_names
from services.gateway.batches.messages import grown
from services.gateway.dispatch.running_batch import RunningBatch
from services.gateway.journal.batch_record import BatchRecord
from services.gateway.metrics import GatewayMetrics
from services.gateway.rollouts.intake import RolloutIntake
from services.gateway.rollouts.recovery import BatchRecovery
from services.platform.collection import pause_collection
from services.platform.redis.connection import OUTAGES

log = structlog.get_logger(__name__)

# Bytes of the groups of one open batch: Redis takes them at once where it has lost them.
_MOST_BYTES = 64 << 20
# Longest time between two looks for batches that nobody has to do with.
_LOOK = 5.0


@dataclass(eq=False)
class OpenBatches:
    """Additions to open batches, and their end, for one term of leadership.

    A batch has `most_samples` at most, and is closed when no trainer had to do with it for `idle_seconds`.
    """

    intake: RolloutIntake
    recovery: BatchRecovery
    metrics: GatewayMetrics
    most_samples: int
    idle_seconds: float

    async def add(self, request: pb.AddSamplesRequest) -> pb.AddSamplesResponse:
        """Add the groups that the batch does not have, and return how many samples that are."""
        key = (request.run_id, request.batch_id)
        _check_names(key)
        async with self.recovery.lock(key):
            record = await self._known(key)
            self.intake.batches.use(key)
            if record.request is None:
                raise _closed(key)
            groups = _new_groups(record, request)
            added = sum(group.samples for group in groups)
            if groups:
                running = await self._may_add(record)
                if violations := await asyncio.to_thread(
                    check_groups, request.groups, record.request, self.intake.limits()
                ):
                    raise InvalidArgument(violations)
                await self._add(running, record, groups, added)
        if added:
            log.info("samples_added", batch=key, samples=added, total=record.total)
        return pb.AddSamplesResponse(added=added, total=record.total)

    async def close(self, key: BatchKey) -> pb.CloseBatchResponse:
        """Let nothing be added to a batch any more."""
        _check_names(key)
        async with self.recovery.lock(key):
            record = await self._known(key)
            was_open = record.open
            await self._close(record)
        return pb.CloseBatchResponse(total=record.total, already_closed=not was_open)

    async def run(self) -> None:
        """Close batches whose trainer has vanished, until cancelled."""
        while True:
            await asyncio.sleep(min(_LOOK, self.idle_seconds / 4))
            for running in list(self.intake.batches.by_key.values()):
                cause = self._over(running)
                if cause:
                    await self._give_up(running, cause)

    async def _known(self, key: BatchKey) -> BatchRecord:
        record = await self.recovery.take_up(key)
        if record is None:
            raise NotFound("batch", "/".join(key))
        return record

    async def _may_add(self, record: BatchRecord) -> RunningBatch:
        """Return an open batch that is worked on; a typed error where nothing can be added to it."""
        running = self.intake.batches.by_key.get(record.key)
        over = running is not None and running.batch.deadline_at <= time.time()
        if record.open and running is not None and over:
            await self._give_up(running, "deadline", locked=True)
        if not record.open:
            raise _closed(record.key)
        if running is None or over:
            raise Unavailable(f"batch {'/'.join(record.key)} is not being worked on here; come again")
        self._check_addition(running)
        return running

    async def _add(
        self, running: RunningBatch, record: BatchRecord, groups: Sequence[pb.Group], samples: int
    ) -> None:
        request = record.request
        assert request is not None, "it is open"
        self._check_addition(running)
        self.intake.headroom.check()
        payload = await asyncio.to_thread(_serialise, groups)
        self._check_size(record, samples, len(payload))
        # Whoever adds: they are on the name of the token that opened the batch.
        self.intake.account()
        account, most_tokens = running.batch.account, 0
        if account is not None:
            most_tokens = await asyncio.to_thread(account.tokens_of, groups, request.sampling)
        with self.intake.batches.reserve(samples, account, most_tokens):
            pause_collection(self.intake.batches.unfinished)
            made = await asyncio.to_thread(
                grown, request, groups, running.batch.exactness, len(request.groups), record.total, account
            )
            await self.intake.journal.add(record, payload, samples)
        # No await from here on: what the journal has is known here.
        record.extend(groups, len(payload))
        if running.dropped:
            raise Unavailable(f"batch {'/'.join(record.key)} is not being worked on here; come again")
        self.intake.dispatcher.extend(running, *made)

    def _check_addition(self, running: RunningBatch) -> None:
        batch = running.batch
        self.intake.check_batch(
            batch.key, batch.policy_version, batch.max_staleness, regenerates=batch.regenerates
        )

    def _check_size(self, record: BatchRecord, samples: int, nbytes: int) -> None:
        if record.total + samples > self.most_samples:
            found = f"{record.total} samples; with {samples} more it would exceed {self.most_samples}"
        elif record.request_bytes + nbytes > _MOST_BYTES:
            found = (
                f"{record.request_bytes} bytes of groups; with {nbytes} more it would exceed {_MOST_BYTES}"
            )
        else:
            return
        message = f"batch {'/'.join(record.key)} has {found}: close it and open another"
        raise ResourceExhausted("batch_size", message)

    async def _close(self, record: BatchRecord) -> None:
        """Close a batch whose lock is held."""
        if not record.open:
            return
        await self.intake.journal.close(record, time.time())
        record.close()
        running = self.intake.batches.by_key.get(record.key)
        if running is not None:
            self.intake.dispatcher.close(running)
        log.info("batch_closed", batch=record.key, samples=record.total)

    def _over(self, running: RunningBatch) -> str:
        """Return why an open batch is to be closed; empty: it is not."""
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
            # It is tried again.
            log.warning("open_batch_not_closed", batch=key, error=str(error))
            return
        self.metrics.closed_batches.labels(cause).inc()


def _check_names(key: BatchKey) -> None:
    if violations := check_names(*key):
        raise InvalidArgument(violations)


def _new_groups(record: BatchRecord, request: pb.AddSamplesRequest) -> list[pb.Group]:
    try:
        return record.new_groups(request.groups)
    except ValueError as differs:
        (number,) = differs.args
        prompt = request.groups[number].prompt_id
        message = f"groups[{number}]: prompt {prompt!r} is in the batch with another content"
        raise AlreadyExists("group", prompt, message) from None


def _serialise(groups: Sequence[pb.Group]) -> bytes:
    return pb.SubmitRolloutsRequest(groups=groups).SerializeToString(deterministic=True)


def _closed(key: BatchKey) -> FailedPrecondition:
    run_id, batch_id = key
    message = f"batch {run_id}/{batch_id} is closed; open another to add groups"
    return FailedPrecondition("BATCH_CLOSED", message, run_id=run_id, batch_id=batch_id)
