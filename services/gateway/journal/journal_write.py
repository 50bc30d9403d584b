"""Pieces of a batch for the journal, each small enough for one turn of Redis. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice

from services.contracts.gateway_keys import BatchKey
from services.gateway.batches.messages import sample_fields
from services.gateway.batches.rollout_batch import RolloutBatch
from services.gateway.batches.sample import SampleEnding, SamplePhase
from services.gateway.journal.batch_record import BatchRecord
from services.gateway.journal.sample_chunks import WHOLE, Head, TokenChunk, pack

MOST_BYTES = 256 << 10
"""Bytes of one write; one part that is larger goes alone."""
MOST_PARTS = 1024
"""Samples that one write extends, ends or forgets."""


@dataclass(frozen=True, slots=True)
class EndedSample:
    """Serialised paceline.v1.Sample, of which the journal has the part `head` as chunks."""

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
    """Part of a batch that the journal does not have yet.

    `done` is the number of samples that it has.
    """

    key: BatchKey
    done: int = 0
    repair: bool = False
    extensions: list[TokenChunk] = field(default_factory=list)
    forgotten: list[int] = field(default_factory=list)
    ended: list[EndedSample] = field(default_factory=list)
    parts: int = 0
    nbytes: int = 0

    def __bool__(self) -> bool:
        return bool(self.parts or self.repair)

    @property
    def is_full(self) -> bool:
        """Return True if more is to go into the next write."""
        return self.parts >= MOST_PARTS or self.nbytes >= MOST_BYTES

    def end(self, ended: EndedSample) -> None:
        """Add a sample that has ended."""
        self.ended.append(ended)
        self.count(len(ended.payload) - ended.head.nbytes)

    def count(self, nbytes: int = 0) -> None:
        """Count one more part."""
        self.parts += 1
        self.nbytes += nbytes


def collect(batch: RolloutBatch, record: BatchRecord, least_tokens: int = 1) -> JournalWrite:
    """Take what the journal does not have out of a batch, up to the size of one write.

    Of unfinished samples it takes those with `least_tokens` new tokens or more, and all that call a tool or were
    given tokens by their environment, for which somebody waits. The tokens of ended samples are
    then in the record only. Must not be called again before the write is settled by `settle` or `undo`.
    """
    write = JournalWrite(batch.key, record.stored, record.repairing)
    for index in islice(record.forgotten, MOST_PARTS):
        write.forgotten.append(index)
        write.count()
    while batch.unjournaled and not write.is_full:
        index = batch.unjournaled.pop()
        state = batch.samples[index]
        # Mostly without the last token, which may be sampled again.
        begin, end = state.journaled, state.settled
        if end - begin >= (1 if end == len(state.tokens) else least_tokens):
            payload = pack(state.part(begin, end), state.version_spans(begin, end)) + state.turns(begin, end)
            write.extensions.append(TokenChunk(index, state.chunks, begin, end, payload))
            state.journaled, state.chunks = end, state.chunks + 1
            write.count(len(payload))
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
    """Record that the journal has a write, but nothing of `torn` samples, which are no part of it any more."""
    record.forgotten.difference_update(write.forgotten)
    write.ended = [ended for ended in write.ended if ended.index not in torn]
    record.confirm(ended.index for ended in write.ended)
    for index in torn:
        record.heads.pop(index, None)
        _write_again(batch, index)


def undo(batch: RolloutBatch, write: JournalWrite) -> None:
    """Record that the journal does not have a write. Ended samples are still in the record."""
    for chunk in write.extensions:
        _write_again(batch, chunk.index, chunk.begin, chunk.number)


def _write_again(batch: RolloutBatch, index: int, begin: int = 0, number: int = 0) -> None:
    """Have the tokens of a sample written from `begin` on, after so many chunks."""
    sample = batch.samples[index]
    if sample.chunks > number:
        sample.journaled, sample.chunks = begin, number
    if sample.phase is not SamplePhase.ENDED:
        batch.unjournaled.add(index)


def _serialised(batch: RolloutBatch, ending: SampleEnding) -> tuple[bytes, Head]:
    """Return a sample that has ended, in which what the journal has comes first."""
    state = batch.samples[ending.index]
    begin = state.journaled if state.chunks else 0
    chunks = pack(state.part(0, begin), state.version_spans(0, begin)) + state.turns(0, begin)
    rest = pack(state.part(begin)) + state.turns(begin) + sample_fields(batch, ending).SerializeToString()
    return chunks + rest, Head(state.chunks, begin, len(chunks)) if begin else WHOLE
