"""Records of batches that this gateway knows, and their results: those in work, and the last ones that finished."""

from __future__ import annotations

from collections import OrderedDict

from services.contracts.gateway_keys import BatchKey
from services.gateway.journal.batch_record import BatchRecord
from services.gateway.journal.journal_write import JournalWrite
from services.gateway.journal.result_cache import ResultCache

_MOST_FINISHED = 16


class RecordedBatches:
    """Records by batch. Of finished batches the ones that were used last are kept. Pure."""

    def __init__(self, most_result_bytes: int) -> None:
        self.results = ResultCache(most_result_bytes)
        self._records: OrderedDict[BatchKey, BatchRecord] = OrderedDict()

    def get(self, key: BatchKey) -> BatchRecord | None:
        """Return the record of a batch, if it is kept."""
        record = self._records.get(key)
        if record is not None:
            self._records.move_to_end(key)
        return record

    def all(self) -> list[BatchRecord]:
        """Return all records that are kept."""
        return list(self._records.values())

    def add(self, record: BatchRecord) -> None:
        """Keep a record."""
        self._records[record.key] = record
        finished = [key for key, each in self._records.items() if each.is_complete]
        for key in finished[:-_MOST_FINISHED]:
            self.forget(key)

    def forget(self, key: BatchKey) -> None:
        """Forget a batch, and its results."""
        record = self._records.pop(key, None)
        if record is not None:
            self.results.drop(key, record.ended())

    def keep(self, write: JournalWrite) -> None:
        """Keep the samples of a write that the journal has, until they are acknowledged."""
        for ended in write.ended:
            if ended.payload:
                self.results.put(write.key, ended.index, ended.payload)

    def payload(self, key: BatchKey, index: int) -> bytes | None:
        """Return a finished sample that is in memory."""
        record = self._records.get(key)
        waiting = record.unwritten.get(index) if record is not None else None
        return waiting or self.results.get(key, index)
