"""Intake of batches: check new ones against the fleet, and recover recorded ones.

Recovery compares the content of Redis with the record in memory, and generates again what is missing. Only
`BatchRecovery` resumes a batch, so that every submission, stream, cancellation and report of a recorded batch finds
it in work.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import structlog

from paceline.transport.channel import MAX_MESSAGE_BYTES
from paceline.v1 import rollout_pb2 as pb
from services.contracts.errors import DataLoss, FailedPrecondition, InvalidArgument, NotFound, Unavailable
from services.contracts.gateway_keys import BatchKey
from services.contracts.sampling import ModelLimits
from services.gateway.api.hints import Hinting
from services.gateway.api.validation import check_names
from services.gateway.journal.chunks import PartialSample
from services.gateway.journal.fenced_records import Fenced
from services.gateway.journal.journal import AdoptedBatch, Journal, cancelled_indexes
from services.gateway.journal.record import BatchRecord, RecordedBatches, StoredBatch
from services.gateway.scheduler.active_batches import Accounts, ActiveBatches, RunningBatch
from services.gateway.scheduler.estimator import Coverage
from services.gateway.scheduler.scheduler import Scheduler
from services.gateway.state.fleet_health import FleetHealth
from services.gateway.state.messages import BatchBuilder
from services.gateway.state.rollout_batch import Account, RolloutBatch
from services.gateway.state.update_book import UpdateBook
from services.platform.memory import pause_collection
from services.platform.security.caller import current_caller

log = structlog.get_logger(__name__)


def check_batch_name(key: BatchKey) -> None:
    """Check the names of a run and a batch. InvalidArgument names the faults."""
    if violations := check_names(*key):
        raise InvalidArgument(violations)


def not_in_work(key: BatchKey) -> Unavailable:
    """Return the error about an unfinished batch that this gateway does not work on."""
    return Unavailable(f"batch {'/'.join(key)} is not in work on this gateway; try again")


@dataclass(eq=False)
class FleetChecks:
    """Checks of requests against the fleet: its policy version, and the limits of its model."""

    fleet: FleetHealth
    book: UpdateBook
    accounts: Accounts
    max_message_bytes: int

    @property
    def version(self) -> int:
        """The published policy version; 0 if there is none."""
        return self.book.version or 0

    def account(self) -> Account | None:
        """Return the account of the current caller; None if it is a service. Unavailable: no instance serves."""
        caller = current_caller()
        return None if caller is None else self.accounts.note(caller, self.limits().max_model_len)

    def check_version(self, version: int) -> None:
        """Check that samples of this policy version can be generated now.

        Raises:
            FailedPrecondition: an update is being applied, or the fleet has another version.
            Unavailable: no instance is serving.
        """
        if self.book.is_applying():
            raise FailedPrecondition(
                "UPDATE_APPLYING", "a weight update is being applied; try again after it"
            )
        current = self.book.version
        if current is None or not self.fleet.usable():
            raise Unavailable("no instance is serving", retry_after=2.0)
        if version != current:
            model = self.fleet.usable()[0].record.model
            raise FailedPrecondition(
                "VERSION_MISMATCH",
                f"policy version {version} was requested; this pool has version {current} of {model}. Submit for "
                f"version {current}, or update the weights to {version} first; a run that needs both at once, or "
                f"another model, needs another pool with version {version}: a gateway and instances with "
                "another namespace",
                current=str(current),
                requested=str(version),
                model=model,
            )

    def check_request(self, request: pb.SubmitRolloutsRequest) -> None:
        """Check that samples of a batch to be submitted or opened can be generated now; raises as `check_batch`.

        A batch without `max_staleness` must begin under its own version, though its samples may continue under a
        later one.
        """
        if not request.HasField("max_staleness"):
            return self.check_version(request.policy_version)
        self.check_batch(
            (request.run_id, request.batch_id),
            request.policy_version,
            request.max_staleness,
            regenerates=request.stale == pb.STALE_REGENERATE,
        )

    def check_batch(
        self, key: BatchKey, version: int, max_staleness: int | None, *, regenerates: bool
    ) -> None:
        """Check that the first samples of a batch, or samples that are added to it, can be generated now.

        Raises:
            FailedPrecondition: its version is no longer served or exceeds its `max_staleness`; see `check_version`.
            Unavailable: no instance is serving, or an update is being applied and the batch continues after it.
        """
        if max_staleness is not None and self.book.is_applying():
            raise Unavailable("a weight update is being applied; try again after it", retry_after=0.5)
        served = self.book.version_for(version, max_staleness)
        self.check_version(version if served is None else served)
        if max_staleness is None or regenerates:
            return
        if self.version - version > max_staleness:
            raise FailedPrecondition(
                "BATCH_STALE",
                f"batch {'/'.join(key)} is of version {version}, and version {self.version} is published: that "
                f"exceeds its max_staleness, {max_staleness}. Open another for the published version",
                current=str(self.version),
                policy_version=str(version),
                max_staleness=str(max_staleness),
            )

    def limits(self) -> ModelLimits:
        """Return the limits that every usable instance can keep. Unavailable if there is no instance."""
        records = [member.record for member in self.fleet.usable()]
        if not records:
            raise Unavailable("no instance is serving", retry_after=2.0)
        return ModelLimits(
            vocab_size=min(record.vocab_size for record in records),
            max_model_len=min(record.max_model_len for record in records),
            has_text=all(record.has_text for record in records),
            end_tokens=tuple(records[0].end_tokens),
            # The SDK takes no larger messages, even of a gateway that is configured for them.
            max_message_bytes=min(self.max_message_bytes, MAX_MESSAGE_BYTES),
        )


@dataclass(eq=False)
class BatchRecovery:
    """Records of batches, and the work on recorded batches that are unfinished, for one term of leadership."""

    journal: Journal
    records: RecordedBatches
    batches: ActiveBatches
    scheduler: Scheduler
    builder: BatchBuilder
    book: UpdateBook
    hinting: Hinting
    # Weak: a lock lives while a call holds it or waits for it.
    _locks: WeakValueDictionary[BatchKey, asyncio.Lock] = field(
        init=False, default_factory=WeakValueDictionary
    )
    _closed: bool = field(init=False, default=False)

    async def recover(self) -> None:
        """Resume every batch that a former gateway left unfinished."""
        for key in await self.journal.unfinished():
            try:
                await self.take_up(key)
            except Fenced as fenced:
                await self.journal.check_lease()
                log.error("batch_taken", batch=key, reason=str(fenced))

    async def known(self, key: BatchKey, cursor: int = 0) -> BatchRecord:
        """Return the record of a batch, and resume the batch if it is unfinished and not in work.

        Raises:
            NotFound: there is no such batch.
            DataLoss: there is none, and its trainer has samples of it up to `cursor`.
        """
        record = self._in_hand(key)
        if record is None:
            async with self.lock(key):
                record = await self.take_up(key)
        if record is not None:
            return record
        name = "/".join(key)
        if cursor:
            raise DataLoss(f"batch {name} is no longer known: the samples after cursor {cursor} are lost")
        raise NotFound("batch", name)

    async def restore(self, record: BatchRecord) -> None:
        """Compare a batch with Redis, and generate its lost samples again."""
        async with self.lock(record.key):
            await self._resume(record.key, record)

    def begin(
        self, batch: RolloutBatch, *, private: bool = False, events: int = 0, coverage: Coverage | None = None
    ) -> RunningBatch:
        """Begin or resume a batch (see `Scheduler.add`), under the version that its samples now continue with."""
        running = self.scheduler.add(batch, private=private, events=events, coverage=coverage)
        version = self.book.version_for(batch.policy_version, batch.max_staleness)
        self.scheduler.continue_under(running, version)
        return running

    def close(self) -> None:
        """Resume no more batches, since the term ends."""
        self._closed = True

    def lock(self, key: BatchKey) -> asyncio.Lock:
        """Return the lock under which a batch is submitted or resumed."""
        return self._locks.setdefault(key, asyncio.Lock())

    async def take_up(self, key: BatchKey) -> BatchRecord | None:
        """Return the record of a batch, and resume the batch if it is not finished.

        Call it under the lock of the batch. A submission may have been interrupted after the record and before the
        work.
        """
        return self._in_hand(key) or await self._resume(key, self.records.get(key))

    def _in_hand(self, key: BatchKey) -> BatchRecord | None:
        """Return the record of a batch that is finished or in work."""
        record = self.records.get(key)
        in_hand = record is not None and (record.is_complete or key in self.batches.by_key)
        return record if in_hand else None

    async def _resume(self, key: BatchKey, record: BatchRecord | None) -> BatchRecord | None:
        """Compare the record of a batch with Redis, and generate again what is missing.

        Returns None if neither memory nor Redis has the batch.
        """
        if self._closed:
            raise Unavailable("this gateway no longer leads; try again")
        if record is None or record.request is None:
            adopted = await self.journal.adopt(key, with_request=True)
            if adopted is None or adopted.request is None:
                if adopted is not None:
                    # Without the request, the samples of the batch are unknown.
                    await self.journal.discard(key)
                await self.journal.unlist(key)
                self.records.forget(key)
                return None
            # No other task has this record yet, so it may be made in a thread.
            record = await asyncio.to_thread(_taken_over, adopted.request, adopted, self.journal.term)
            lost: list[int] = []
        else:
            there = await self.journal.look(record) or StoredBatch()
            lost = record.reconcile(there, lambda index: self.records.kept(key, index))
        self.records.add(record)
        if key in self.batches.by_key:
            self.scheduler.reopen(key, lost)
        elif record.is_complete:
            await self.journal.unlist(key)
        else:
            await self._begin_again(record)
        return record

    async def _begin_again(self, record: BatchRecord) -> None:
        """Begin to work on the samples of a batch that have not ended."""
        assert record.request is not None
        left = [index for index in range(record.total) if not record.has_ended(index)]
        partials = await self.journal.partials(record.key, left)
        pause_collection(record.total)
        batch = await asyncio.to_thread(_rebuild, self.builder, record, record.request, partials)
        self.hinting.resume(batch)
        self.begin(batch, events=record.safe)
        self.scheduler.reopen(record.key, [])
        log.info(
            "batch_resumed",
            batch=record.key,
            finished=record.finished,
            partial=len(partials),
            total=record.total,
            open=record.open,
        )


def _taken_over(request: pb.SubmitRolloutsRequest, adopted: AdoptedBatch, term: int) -> BatchRecord:
    """Return the record of a batch that is known from Redis alone."""
    record = BatchRecord(request, adopted.head, term)
    record.reconcile(adopted.there, lambda index: None)
    return record


def _rebuild(
    builder: BatchBuilder,
    record: BatchRecord,
    request: pb.SubmitRolloutsRequest,
    partials: list[PartialSample],
) -> RolloutBatch:
    """Return the state of a recorded batch, with the tokens of its unfinished samples that the journal has."""
    head = record.head
    batch = builder.from_submission(
        request, head.accepted_at, head.lenience, opened=record.open, account=head.account
    )
    for index in record.ended():
        batch.mark_ended(index)
    for partial in partials:
        tokens = partial.parse()
        if tokens is not None:
            batch.restore(partial.index, tokens, partial.head.chunks)
    for cancel in record.cancels:
        for index in cancelled_indexes(record, cancel.samples):
            batch.cancel(index, cancel.keep_partial)
    return batch
