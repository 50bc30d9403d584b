"""Recovery of batches: what Redis has of them is compared with what is known here, and what is missing made up for.

Nobody else takes a batch up: neither a submission nor a stream, a cancellation or a report may find one recorded
and not worked on.
"""

import asyncio
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import structlog

from paceline.v1 import rollout_pb2 as pb
from services.contracts.errors import DataLoss, NotFound, Unavailable
from services.contracts.gateway_keys import BatchKey
from services.gateway.batches.messages import BatchBuilder
from services.gateway.batches.rollout_batch import RolloutBatch
from services.gateway.hints.hinting import Hinting
from services.gateway.journal.batch_record import BatchRecord, StoredBatch
from services.gateway.journal.fenced_records import Fenced
from services.gateway.journal.journal import AdoptedBatch, cancelled_indexes
from services.gateway.journal.sample_chunks import PartialSample
from services.gateway.rollouts.intake import RolloutIntake
from services.platform.collection import pause_collection

log = structlog.get_logger(__name__)


@dataclass(eq=False)
class BatchRecovery:
    """Records of batches, and the work on those that are recorded and unfinished, for one term of leadership."""

    intake: RolloutIntake
    hinting: Hinting
    # Weak: a lock lives as long as somebody holds it or waits for it.
    _locks: WeakValueDictionary[BatchKey, asyncio.Lock] = field(
        init=False, default_factory=WeakValueDictionary
    )
    _closed: bool = field(init=False, default=False)

    async def recover(self) -> None:
        """Resume every batch that a former gateway left unfinished."""
        for key in await self.intake.journal.unfinished():
            try:
                await self.take_up(key)
            except Fenced as fenced:
                await self.intake.journal.check_lease()
                log.error("batch_taken", batch=key, reason=str(fenced))

    async def known(self, key: BatchKey, cursor: int = 0) -> BatchRecord:
        """Return the record of a batch, which is taken up if nobody works on it.

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
            raise DataLoss(f"batch {name} is not known any more: what came after cursor {cursor} is lost")
        raise NotFound("batch", name)

    async def restore(self, record: BatchRecord) -> None:
        """Look for the samples of a batch, and have those that are lost generated again."""
        async with self.lock(record.key):
            await self._resume(record.key, record)

    def close(self) -> None:
        """End with the term: nothing is taken up any more."""
        self._closed = True

    def lock(self, key: BatchKey) -> asyncio.Lock:
        """Return the lock under which a batch is submitted or taken up."""
        return self._locks.setdefault(key, asyncio.Lock())

    async def take_up(self, key: BatchKey) -> BatchRecord | None:
        """Return the record of a batch, and let it be worked on if it is not finished.

        Call it under the lock of the batch. Its submission may have been cut off after the record and before the
        work.
        """
        return self._in_hand(key) or await self._resume(key, self.intake.records.get(key))

    def _in_hand(self, key: BatchKey) -> BatchRecord | None:
        """Return the record of a batch that is finished or worked on."""
        record = self.intake.records.get(key)
        worked_on = record is not None and (record.is_complete or key in self.intake.batches.by_key)
        return record if worked_on else None

    async def _resume(self, key: BatchKey, record: BatchRecord | None) -> BatchRecord | None:
        """Compare what is known of a batch with what Redis has, and make up for what is missing.

        Returns None if there is nothing of it anywhere.
        """
        if self._closed:
            raise Unavailable("this gateway no longer leads; come again")
        journal, records = self.intake.journal, self.intake.records
        if record is None or record.request is None:
            adopted = await journal.adopt(key, with_request=True)
            if adopted is None or adopted.request is None:
                if adopted is not None:
                    # It is known by number only which samples there are.
                    await journal.discard(key)
                await journal.unlist(key)
                records.forget(key)
                return None
            # Nobody else has the record yet, so this may be done in a thread.
            record = await asyncio.to_thread(_taken_over, adopted.request, adopted, journal.term)
            lost: list[int] = []
        else:
            there = await journal.look(record) or StoredBatch()
            lost = record.reconcile(there, lambda index: records.results.get(key, index))
        records.add(record)
        if key in self.intake.batches.by_key:
            self.intake.dispatcher.reopen(key, lost)
        elif record.is_complete:
            await journal.unlist(key)
        else:
            await self._begin_again(record)
        return record

    async def _begin_again(self, record: BatchRecord) -> None:
        """Work on what has not ended of a batch."""
        assert record.request is not None
        left = [index for index in range(record.total) if not record.has_ended(index)]
        partials = await self.intake.journal.partials(record.key, left)
        pause_collection(record.total)
        batch = await asyncio.to_thread(_rebuild, self.intake.builder, record, record.request, partials)
        self.hinting.resume(batch)
        self.intake.begin(batch, events=record.safe)
        self.intake.dispatcher.reopen(record.key, [])
        log.info(
            "batch_resumed",
            batch=record.key,
            finished=record.finished,
            partial=len(partials),
            total=record.total,
            open=record.open,
        )


def _taken_over(request: pb.SubmitRolloutsRequest, adopted: AdoptedBatch, term: int) -> BatchRecord:
    """Return the record of a batch of which Redis has everything that is known."""
    record = BatchRecord(request, adopted.head, term)
    record.reconcile(adopted.there, lambda index: None)
    return record


def _rebuild(
    builder: BatchBuilder,
    record: BatchRecord,
    request: pb.SubmitRolloutsRequest,
    partials: list[PartialSample],
) -> RolloutBatch:
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
