"""Records of batches in the journal: the ended samples, their cursors, and the next writes. Pure.

Redis may forget writes that it acknowledged, so this record, and not Redis, decides which sample a cursor names. A
cursor is `(term << 32) | n`: terms ascend whatever Redis forgets, so the cursors of a new term are higher than all
that a trainer has seen. `BatchRecord.reconcile` compares the record with Redis. A missing sample is written again
at the same cursor if its bytes are still in memory. Otherwise it is generated again, from its seed, and gets a new
cursor.

`collect` takes the next write out of a batch, small enough not to block Redis; `settle` or `undo` completes it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from paceline.v1 import rollout_pb2 as pb
from paceline.v1 import sample_pb2
from services.contracts.gateway_keys import BatchKey
from services.gateway.journal.chunks import WHOLE, Head, TokenChunk, pack
from services.gateway.state.messages import sample_fields
from services.gateway.state.rollout_batch import Account, RolloutBatch
from services.gateway.state.sample import SampleEnding, SamplePhase

_TERM_BITS = 32


@dataclass(frozen=True, slots=True)
class BatchHead:
    """Head of a batch's record. `lenience` is the l of its samples, None if the level has none.

    `total`, the number of samples, and `open` (True: groups may be added) are from the time when it was recorded or
    read. `account` belongs to the token with which the batch was submitted.
    """

    fingerprint: str
    accepted_at: float
    total: int
    lenience: float | None
    open: bool = False
    account: Account | None = None


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """Content of Redis about a batch.

    `done`: sample index -> cursor. `events`: indexes whose samples are in Redis with all their chunks. `acked`: the
    acknowledged cursor.
    """

    done: dict[int, int] = field(default_factory=dict)
    events: frozenset[int] = frozenset()
    acked: int = 0
    cancels: tuple[pb.CancelRolloutsRequest, ...] = ()


class BatchRecord:
    """Samples of one batch that have ended, as the leader of `term` knows them."""

    def __init__(self, request: pb.SubmitRolloutsRequest, head: BatchHead, term: int) -> None:
        self.key: BatchKey = (request.run_id, request.batch_id)
        self.head = head
        self.step: int = request.step
        self.policy_version: int = request.policy_version
        self.exactness: sample_pb2.Exactness = request.exactness
        self.request: pb.SubmitRolloutsRequest | None = request
        """Request with all groups so far; None once every sample has been acknowledged."""
        self.request_bytes = request.ByteSize() if head.open else 0
        """Bytes of the request of an open batch."""
        self.total = head.total
        """Number of samples of the batch, so far if it is open."""
        self.open = head.open
        """Groups may be added."""
        self.cancels: list[pb.CancelRolloutsRequest] = []
        self.unwritten: dict[int, bytes] = {}
        """Sample index -> payload that has a cursor and is not known to be in Redis. Empty: acknowledged."""
        self.unwritten_bytes = 0
        """Bytes of these payloads."""
        self.heads: dict[int, Head] = {}
        """Heads of unwritten samples whose first tokens are in Redis as chunks; the others are written whole."""
        self.forgotten: set[int] = set()
        """Samples that Redis has to forget."""
        self.repairing = False
        """Redis has lost data, or has data that it should not have: the next writes correct it."""
        self.written = 0
        """Cursor up to which samples may be delivered: Redis has acknowledged them."""
        self.acked = 0
        """Cursor up to which the trainer has acknowledged samples."""
        self.last = term << _TERM_BITS
        """Highest cursor that can have been delivered."""
        self.stored: set[int] = set()
        """Samples that should be done in Redis."""
        self._trimmed = 0
        self._cursors: dict[int, int] = {}
        # The same, ascending.
        self._order: list[int] = []
        self._indexes: list[int] = []
        # Prompt id -> index of the first sample, number of samples, number of the group.
        self._groups: dict[str, tuple[int, int, int]] = {}
        self._note(request.groups, 0)

    @property
    def safe(self) -> int:
        """Number of ended samples that need not be written."""
        return len(self._cursors) - len(self.unwritten)

    @property
    def finished(self) -> int:
        """Number of samples that may be delivered or have been."""
        return bisect_right(self._order, self.written)

    @property
    def acknowledged(self) -> int:
        """Number of samples that have been acknowledged."""
        return bisect_right(self._order, self.acked)

    @property
    def is_complete(self) -> bool:
        """Return True if every sample has ended and is in Redis, and no more can be added."""
        return not self.open and self.safe == self.total and not self.forgotten

    @property
    def is_acknowledged(self) -> bool:
        """Return True if every sample has been acknowledged, and no more can be added."""
        return not self.open and 0 < self.total == self.acknowledged

    def new_groups(self, groups: Iterable[pb.Group]) -> list[pb.Group]:
        """Return the groups that are not in the batch. ValueError(number): a group of this name differs."""
        assert self.request is not None, "all was acknowledged"
        found = list[pb.Group]()
        for number, group in enumerate(groups):
            known = self._groups.get(group.prompt_id)
            if known is None:
                found.append(group)
            elif self.request.groups[known[2]] != group:
                raise ValueError(number)
        return found

    def extend(self, groups: Sequence[pb.Group], nbytes: int) -> None:
        """Add groups, which have `nbytes` bytes."""
        assert self.request is not None, "all was acknowledged"
        first = len(self.request.groups)
        self.request.groups.extend(groups)
        self.request_bytes += nbytes
        self.total = self._note(groups, first, self.total)

    def close(self) -> None:
        """Record that nothing can be added any more."""
        self.open = False
        self.trimmed(self._trimmed)

    def index_of(self, prompt_id: str, slot: int) -> int | None:
        """Return the index of a sample; None if the batch does not have it."""
        first, samples, _ = self._groups.get(prompt_id, (0, 0, 0))
        return first + slot if slot < samples else None

    def has_ended(self, index: int) -> bool:
        """Return True if a sample has ended."""
        return index in self._cursors

    def ended(self) -> Iterable[int]:
        """Return the indexes of all samples that have ended."""
        return self._cursors.keys()

    def cursor_of(self, index: int) -> int:
        """Return the cursor of a sample that has ended."""
        return self._cursors[index]

    def after(self, cursor: int, count: int) -> list[tuple[int, int]]:
        """Return (cursor, sample index) of up to `count` samples after `cursor` that may be delivered."""
        begin = bisect_right(self._order, cursor)
        end = min(begin + count, self.finished)
        return list(zip(self._order[begin:end], self._indexes[begin:end], strict=True))

    def end(self, index: int, payload: bytes, head: Head = WHOLE) -> int:
        """Give an ended sample its cursor, and keep its bytes until they are written."""
        self.last += 1
        self._put(index, self.last)
        self.unwritten[index] = payload
        self.unwritten_bytes += len(payload)
        if head.chunks:
            self.heads[index] = head
        return self.last

    def confirm(self, indexes: Iterable[int]) -> None:
        """Record that Redis has acknowledged samples, and has forgotten the samples that it should."""
        for index in indexes:
            self.unwritten_bytes -= len(self.unwritten.pop(index, b""))
            self.heads.pop(index, None)
            self.stored.add(index)
            self.written = max(self.written, self._cursors[index])
        self.repairing = self.repairing and bool(self.unwritten or self.forgotten)

    def reconcile(self, there: StoredBatch, kept: Callable[[int], bytes | None]) -> list[int]:
        """Correct the record by the content of Redis; return the samples that are lost.

        `kept` returns the bytes of a sample that are still in memory. A new record takes over the content of Redis.
        """
        fresh = not self._cursors
        self.acked = max(self.acked, there.acked)
        if fresh:
            self._take_over(there)
        lost = []
        for index, cursor in self._cursors.items():
            acked = cursor <= self.acked
            if there.done.get(index) == cursor and (acked or index in there.events):
                self.unwritten.pop(index, None)
                self.written = max(self.written, cursor)
            elif acked:
                self.unwritten[index] = b""
            elif index not in self.unwritten:
                payload = kept(index)
                if payload is None:
                    lost.append(index)
                else:
                    self.unwritten[index] = payload
        self._remove(lost)
        self.heads.clear()
        self.unwritten = dict(sorted(self.unwritten.items(), key=lambda item: self._cursors[item[0]]))
        self.unwritten_bytes = sum(map(len, self.unwritten.values()))
        self.forgotten = {*there.done, *there.events} - self._cursors.keys()
        self.stored = set(there.done) - self.forgotten
        self.repairing = True
        return lost

    def follow(self, former: BatchRecord) -> None:
        """Continue after the cursors of a former batch of this id, which was discarded."""
        self.last = max(self.last, former.last)

    def acknowledge(self, cursor: int) -> list[int]:
        """Record an acknowledgement; return the samples that Redis need no longer keep."""
        self.acked = max(self.acked, min(cursor, self.written))
        begin, end = bisect_right(self._order, self._trimmed), bisect_right(self._order, self.acked)
        return self._indexes[begin:end]

    def trimmed(self, cursor: int) -> None:
        """Record that Redis has dropped samples up to `cursor`."""
        self._trimmed = max(self._trimmed, cursor)
        if self.is_acknowledged:
            self.request = None

    def _note(self, groups: Iterable[pb.Group], first_group: int, first: int = 0) -> int:
        """Index groups from group number `first_group` and sample `first`; return the next sample index."""
        for number, group in enumerate(groups, first_group):
            self._groups[group.prompt_id] = (first, group.samples, number)
            first += group.samples
        return first

    def _take_over(self, there: StoredBatch) -> None:
        known = ((cursor, index) for index, cursor in there.done.items())
        for cursor, index in sorted(known):
            if index < self.total and (cursor <= there.acked or index in there.events):
                self._put(index, cursor)
        self.written = self._order[-1] if self._order else 0
        self.last = max(self.last, self.written)
        self._trimmed = there.acked
        self.cancels = list(there.cancels)

    def _put(self, index: int, cursor: int) -> None:
        self._cursors[index] = cursor
        self._order.append(cursor)
        self._indexes.append(index)

    def _remove(self, lost: list[int]) -> None:
        if not lost:
            return
        for index in lost:
            del self._cursors[index]
        kept = sorted((cursor, index) for index, cursor in self._cursors.items())
        self._order, self._indexes = [cursor for cursor, _ in kept], [index for _, index in kept]


MOST_BYTES = 256 << 10
"""Bytes of one write; a larger part is written alone."""
MOST_PARTS = 1024
"""Samples that one write extends, ends or forgets."""
_MOST_FINISHED = 16


@dataclass(frozen=True, slots=True)
class EndedSample:
    """Serialised paceline.v1.Sample; the journal has the chunks in `head` already."""

    index: int
    cursor: int
    payload: bytes
    head: Head

    @property
    def rest(self) -> bytes:
        """Part of the payload that the journal does not have."""
        return self.payload[self.head.nbytes :]


@dataclass(slots=True)
class JournalWrite:
    """Part of a batch that the journal does not have yet. `done` is the number of samples that it has."""

    key: BatchKey
    done: int = 0
    repair: bool = False
    extensions: list[TokenChunk] = field(default_factory=list)
    forgotten: list[int] = field(default_factory=list)
    ended: list[EndedSample] = field(default_factory=list)
    nbytes: int = 0

    def __bool__(self) -> bool:
        return bool(self.extensions or self.forgotten or self.ended or self.repair)

    @property
    def is_full(self) -> bool:
        """Return True if further parts belong in the next write."""
        parts = len(self.extensions) + len(self.forgotten) + len(self.ended)
        return parts >= MOST_PARTS or self.nbytes >= MOST_BYTES

    def end(self, ended: EndedSample) -> None:
        """Add a sample that has ended."""
        self.ended.append(ended)
        self.nbytes += len(ended.payload) - ended.head.nbytes


def collect(batch: RolloutBatch, record: BatchRecord, least_tokens: int = 1) -> JournalWrite:
    """Take the next write out of a batch: at most one write's size of what the journal does not have.

    Of unfinished samples it takes those with at least `least_tokens` new tokens, and all whose new tokens end with
    a tool call or include tokens of their environment, for which a trainer waits. Afterwards only the record has
    the tokens of ended samples. Must not be called again before `settle` or `undo`.
    """
    write = JournalWrite(batch.key, len(record.stored), record.repairing)
    write.forgotten += islice(record.forgotten, MOST_PARTS)
    while batch.unjournaled and not write.is_full:
        index = batch.unjournaled.pop()
        state = batch.samples[index]
        # `settled` usually excludes the last token, which may be sampled again.
        begin, end = state.journaled, state.settled
        # An instance may have continued the sample since its answer.
        awaited = end == len(state.tokens) or (state.environment and state.environment[-1][1] > begin)
        if end - begin >= (1 if awaited else least_tokens):
            payload = pack(state.columns, begin, end) + state.turns(begin, end)
            write.extensions.append(TokenChunk(index, state.chunks, begin, end, payload))
            state.journaled, state.chunks = end, state.chunks + 1
            write.nbytes += len(payload)
    for index, payload in record.unwritten.items():
        if write.is_full:
            return write
        write.end(EndedSample(index, record.cursor_of(index), payload, record.heads.get(index, WHOLE)))
    taken = 0
    for ending in batch.endings:
        if write.is_full:
            break
        payload, head = _serialised(batch, ending)
        write.end(EndedSample(ending.index, record.end(ending.index, payload, head), payload, head))
        batch.ended_tokens -= batch.samples[ending.index].entries
        batch.samples[ending.index].forget_tokens()
        taken += 1
    del batch.endings[:taken]
    return write


def has_more(batch: RolloutBatch, record: BatchRecord) -> bool:
    """Return True if another `collect` would find something."""
    return bool(
        batch.unjournaled or batch.endings or record.unwritten or record.forgotten or record.repairing
    )


def settle(batch: RolloutBatch, record: BatchRecord, write: JournalWrite, torn: list[int]) -> None:
    """Record that the journal has a write, except for `torn` samples, which are removed from it."""
    record.forgotten.difference_update(write.forgotten)
    write.ended = [ended for ended in write.ended if ended.index not in torn]
    record.confirm(ended.index for ended in write.ended)
    for index in torn:
        record.heads.pop(index, None)
        _write_again(batch, index)


def undo(batch: RolloutBatch, write: JournalWrite) -> None:
    """Record that the journal does not have a write. Ended samples stay in the record."""
    for chunk in write.extensions:
        _write_again(batch, chunk.index, chunk.begin, chunk.number)


def _write_again(batch: RolloutBatch, index: int, begin: int = 0, number: int = 0) -> None:
    """Have the tokens of a sample written again from `begin` on, after `number` chunks."""
    sample = batch.samples[index]
    if sample.chunks > number:
        sample.journaled, sample.chunks = begin, number
    if sample.phase is not SamplePhase.ENDED:
        batch.unjournaled.add(index)


def _serialised(batch: RolloutBatch, ending: SampleEnding) -> tuple[bytes, Head]:
    """Return an ended sample as bytes, beginning with the part that the journal has, and the head of that part."""
    state = batch.samples[ending.index]
    begin = state.journaled if state.chunks else 0
    chunks = pack(state.columns, 0, begin) + state.turns(0, begin)
    rest = pack(state.columns, begin) + state.turns(begin) + sample_fields(batch, ending).SerializeToString()
    return chunks + rest, Head(state.chunks, begin, len(chunks)) if begin else WHOLE


class RecordedBatches:
    """Records by batch, and the finished samples of all batches that are kept in memory. Pure.

    Of finished batches the most recently used ones are kept. Finished samples take at most `most_result_bytes`,
    above which the oldest are dropped. They are delivered from here, and written again if Redis loses them.
    """

    def __init__(self, most_result_bytes: int) -> None:
        self.nbytes = 0
        """Bytes of all finished samples that are kept."""
        self._most_bytes = most_result_bytes
        self._results: OrderedDict[tuple[BatchKey, int], bytes] = OrderedDict()
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
        """Forget a batch, and its finished samples."""
        record = self._records.pop(key, None)
        if record is not None:
            self.drop(key, record.ended())

    def keep(self, key: BatchKey, index: int, payload: bytes) -> None:
        """Keep a finished sample that the journal has, if it fits, until it is acknowledged."""
        self.drop(key, (index,))
        self._results[key, index] = payload
        self.nbytes += len(payload)
        while self.nbytes > self._most_bytes:
            _, oldest = self._results.popitem(last=False)
            self.nbytes -= len(oldest)

    def kept(self, key: BatchKey, index: int) -> bytes | None:
        """Return a finished sample that is kept."""
        return self._results.get((key, index))

    def drop(self, key: BatchKey, indexes: Iterable[int]) -> None:
        """Drop finished samples of a batch."""
        for index in indexes:
            self.nbytes -= len(self._results.pop((key, index), b""))

    def payload(self, key: BatchKey, index: int) -> bytes | None:
        """Return a finished sample that is in memory: not written yet, or kept."""
        record = self._records.get(key)
        waiting = record.unwritten.get(index) if record is not None else None
        return waiting or self._results.get((key, index))
