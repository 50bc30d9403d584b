"""Journal of batches in Redis, which makes streams resumable and survives the gateway.

For each batch it holds the request, the tokens of unfinished samples, and the finished samples until they are
acknowledged. A sample is delivered only after Redis has acknowledged it. Reads and writes are small and may be
repeated. The caller decides how to treat an outage, and samples that Redis has lost
(services/gateway/journal/record.py).
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis, RedisCluster
from redis.exceptions import NoScriptError, ResponseError

from paceline.v1 import rollout_pb2 as pb
from services.contracts.errors import FailedPrecondition, Unavailable
from services.contracts.gateway_keys import BatchKey, BatchKeys, GatewayKeys
from services.gateway.journal import scripts
from services.gateway.journal.chunks import WHOLE, Head, PartialSample
from services.gateway.journal.fenced_records import Fenced
from services.gateway.journal.record import MOST_PARTS, BatchHead, BatchRecord, JournalWrite, StoredBatch
from services.gateway.state.rollout_batch import Account

# Requests above this are serialised in a thread.
_LARGE_BYTES = 1 << 20
# Most fields, and most tokens of chunks, that are read in one round trip.
_READ_FIELDS, _READ_TOKENS = 1024, 1 << 19
FORMAT = "5"
"""Version of the journal's format."""
_WRITE_DIGEST = hashlib.sha1(scripts.WRITE.encode(), usedforsecurity=False).hexdigest()


class JournalHole(Exception):
    """Raised when Redis has less of a batch than it acknowledged, or data whose write it never acknowledged."""


class BatchGone(JournalHole):
    """Raised when Redis has nothing of a batch."""


@dataclass(frozen=True, slots=True)
class AdoptedBatch:
    """A batch that now belongs to this term, as Redis has it.

    `request` is None if it was not requested, or if Redis has lost groups that were added to it.
    """

    head: BatchHead
    request: pb.SubmitRolloutsRequest | None
    there: StoredBatch


class Journal:
    """Reader and writer of the journal as the leader of `term`.

    A finished batch is kept for `retention_seconds`, and for `acked_seconds` once all of it is acknowledged.
    """

    def __init__(
        self, redis: Redis, namespace: str, term: int, retention_seconds: float, acked_seconds: float
    ) -> None:
        self._redis: Any = redis
        self._namespace = namespace
        self.term = term
        self._retention = max(1, int(retention_seconds))
        self._acked = max(1, int(acked_seconds))
        self._keys = GatewayKeys(namespace)

    async def check_format(self, *, record: bool = True) -> None:
        """Check the format of the journal. For another format, FailedPrecondition names the command to run.

        With `record` an empty journal gets this format.
        """
        keys = (self._keys.format, self._keys.batches)
        known = text(await self._eval(scripts.FORMAT, keys, FORMAT, _flag(record)))
        if known != FORMAT:
            command = f"python -m services.gateway.drain --namespace {self._namespace}"
            raise FailedPrecondition(
                "JOURNAL_FORMAT",
                f"the journal in Redis has format {known}, this gateway reads {FORMAT}: let the gateway that wrote "
                f"it finish its batches, then stop it and run `{command} --redis-url ...`",
                found=known,
                known=FORMAT,
            )

    async def create(self, record: BatchRecord, payload: bytes) -> bool:
        """Record a batch, whose serialised request is `payload`; return False if another one has its id.

        Fenced if a successor has recorded it.
        """
        # List first: a batch that is recorded but not listed would be resumed only when a trainer asks for it.
        await self._redis.sadd(self._keys.batches, ":".join(record.key))
        names, head = BatchKeys(self._namespace, record.key), record.head
        lenience = "" if head.lenience is None else repr(head.lenience)
        cancels = [cancel.SerializeToString() for cancel in record.cancels]
        account = "" if head.account is None else head.account.to_text()
        args = (
            *(head.fingerprint, payload, repr(head.accepted_at), record.total, lenience),
            *(_flag(record.open), account),
        )
        return bool(await self._eval(scripts.CREATE, names.all, self.term, *args, *cancels))

    async def add(self, record: BatchRecord, groups: bytes, samples: int) -> None:
        """Record groups, with `samples` samples, that are added to an open batch. Fenced: a successor has it."""
        await self._change(scripts.ADD, record, record.total, record.total + samples, groups)

    async def close(self, record: BatchRecord, now: float) -> None:
        """Record that a batch is closed. Fenced: a successor has it."""
        expiry = self._acked if record.acknowledged == record.total else self._retention
        await self._change(scripts.CLOSE, record, record.total, expiry, repr(now))

    async def _change(self, script: str, record: BatchRecord, *args: object) -> None:
        """Run a script that expects Redis to have what is known of a batch; write that again if it is missing."""
        for _ in range(2):
            try:
                await self._eval(script, BatchKeys(self._namespace, record.key).all, self.term, *args)
            except JournalHole:
                await self._mend(record)
            else:
                return
        raise Unavailable(f"Redis keeps losing data of batch {'/'.join(record.key)}; try again")

    async def look(self, record: BatchRecord) -> StoredBatch | None:
        """Return the content of Redis about a batch, and record again what is missing of its request.

        Returns None if Redis has nothing and all of the batch was acknowledged. Fenced if a successor has it.
        """
        adopted = await self.adopt(record.key, with_request=False)
        if adopted is None and record.request is None:
            return None
        fewer = adopted is not None and adopted.head.total < record.total
        if adopted is None or fewer or (adopted.head.open and not record.open):
            await self._mend(record, also_additions=False)
        return StoredBatch() if adopted is None else adopted.there

    async def _mend(self, record: BatchRecord, *, also_additions: bool = True) -> None:
        """Record the request of a batch again, as it is known here. Its samples are written separately.

        With `also_additions` this removes groups that are in Redis and not known here. Without it, nothing happens
        if Redis has at least as many samples.
        """
        if record.request is None:
            return
        total, payload = -1, b""
        while total != record.total:
            # Groups may be added while a large request is serialised.
            total = record.total
            payload, _ = await serialised(record.request)
        args = (payload, total, _flag(record.open), int(also_additions))
        try:
            await self._eval(scripts.MEND, BatchKeys(self._namespace, record.key).all, self.term, *args)
        except BatchGone:
            await self.create(record, payload)

    async def write(self, pieces: Sequence[tuple[JournalWrite, BatchRecord]], now: float) -> list[Any]:
        """Write all pieces in one round trip, each atomically.

        Returns for each piece the samples whose earlier chunks were missing, or the error: Fenced, JournalHole,
        BatchGone, or an error of Redis.
        """
        calls = [self._write_arguments(write, record, now) for write, record in pieces]
        # A pipeline of a cluster takes no EVALSHA.
        by_digest = not isinstance(self._redis, RedisCluster)
        replies = await self._run_all(calls, by_digest=by_digest)
        unknown = [at for at, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
        if unknown:
            again = await self._run_all([calls[at] for at in unknown], by_digest=False)
            for at, reply in zip(unknown, again, strict=True):
                replies[at] = reply
        return [typed(reply) for reply in replies]

    async def events(self, key: BatchKey, indexes: Sequence[int]) -> list[bytes | None]:
        """Return the serialised samples with these indexes, None for a missing one."""
        return await read_ended(self._redis, BatchKeys(self._namespace, key), indexes)

    async def adopt(self, key: BatchKey, *, with_request: bool) -> AdoptedBatch | None:
        """Take over a batch for this term and return the content of Redis about it; None if there is none.

        Fenced if a successor has it.
        """
        names = BatchKeys(self._namespace, key)
        reply = await self._eval(scripts.ADOPT, names.all, self.term, int(with_request))
        if reply is None:
            return None
        meta, done, events, cancels, adds = reply
        fingerprint, accepted_at, total, lenience, opened, account, acked, request = meta
        head = BatchHead(
            *(text(fingerprint), float(accepted_at), int(total), number(lenience), text(opened) == "1"),
            # None: an earlier version has recorded the batch.
            Account.from_text(text(account or b"")),
        )
        # Parsing up to 65,536 samples takes longer than a turn of the event loop may.
        cursors, heads, indexes = await asyncio.to_thread(parse_ended, done, events)
        there = StoredBatch(
            cursors,
            await self._whole(names, indexes, heads),
            int(acked or 0),
            tuple(pb.CancelRolloutsRequest.FromString(cancel) for cancel in cancels),
        )
        parsed = merged(request, adds) if with_request else None
        if parsed is not None and sum(group.samples for group in parsed.groups) != head.total:
            parsed = None
        return AdoptedBatch(head, parsed, there)

    async def partials(self, key: BatchKey, indexes: Sequence[int]) -> list[PartialSample]:
        """Return these unfinished samples with their chunks; leave out those without."""
        names = BatchKeys(self._namespace, key)
        return await read_chunks(self._redis, names, await read_heads(self._redis, names, indexes))

    async def cancel(self, request: pb.CancelRolloutsRequest) -> None:
        """Record a cancellation, so that it survives a restart. BatchGone: Redis has lost the batch."""
        names = BatchKeys(self._namespace, (request.run_id, request.batch_id))
        await self._eval(scripts.CANCEL, names.all, self.term, request.SerializeToString())

    async def acknowledge(self, record: BatchRecord, indexes: Sequence[int]) -> int:
        """Drop acknowledged samples; return how many Redis had. Does nothing if Redis does not have the batch."""
        names, trimmed = BatchKeys(self._namespace, record.key), 0
        for begin in range(0, max(1, len(indexes)), MOST_PARTS):
            last = begin + MOST_PARTS >= len(indexes)
            expiry = self._acked if last and record.is_acknowledged else ""
            args = (record.acked, expiry, *indexes[begin : begin + MOST_PARTS])
            try:
                trimmed += await self._eval(scripts.ACK, names.all, self.term, *args)
            except BatchGone:
                return trimmed
        return trimmed

    async def discard(self, key: BatchKey) -> None:
        """Forget a finished batch."""
        await self._eval(scripts.DISCARD, BatchKeys(self._namespace, key).all, self.term)

    async def unfinished(self) -> list[BatchKey]:
        """Return the batches that are listed as unfinished."""
        names = await self._redis.smembers(self._keys.batches)
        pairs = (text(name).split(":", 1) for name in names)
        return sorted((run_id, batch_id) for run_id, batch_id in pairs)

    async def unlist(self, key: BatchKey) -> None:
        """Remove a batch from the list of unfinished ones."""
        await self._redis.srem(self._keys.batches, ":".join(key))

    async def check_lease(self) -> None:
        """Check that no other gateway leads. Fenced if one does."""
        holder = await self._redis.get(self._keys.lease)
        if holder is not None and text(holder) != str(self.term):
            raise Fenced(f"the lease belongs to {text(holder)}")

    async def _whole(
        self, names: BatchKeys, there: Sequence[int], heads: Mapping[int, Head]
    ) -> frozenset[int]:
        """Return the complete samples among `there`, the ended samples that have an event."""
        chunked = [index for index in there if heads[index].chunks]
        found = await read_heads(self._redis, names, chunked)
        return frozenset(
            index for index in there if not heads[index].chunks or heads[index] == found.get(index)
        )

    async def _eval(self, script: str, keys: Sequence[str], *args: object) -> Any:
        try:
            return await self._redis.eval(script, len(keys), *keys, *args)
        except ResponseError as error:
            raise typed(error) from error

    async def _run_all(
        self, calls: Sequence[tuple[list[str], list[object]]], *, by_digest: bool
    ) -> list[Any]:
        """Run WRITE with each pair of keys and arguments in one round trip; send its digest or its text."""
        pipe = self._redis.pipeline(transaction=False)
        for keys, args in calls:
            if by_digest:
                pipe.evalsha(_WRITE_DIGEST, len(keys), *keys, *args)
            else:
                pipe.eval(scripts.WRITE, len(keys), *keys, *args)
        replies: list[Any] = await pipe.execute(raise_on_error=False)
        return replies

    def _write_arguments(
        self, write: JournalWrite, record: BatchRecord, now: float
    ) -> tuple[list[str], list[object]]:
        keys = list(BatchKeys(self._namespace, write.key).all)
        expiry = self._acked if record.is_acknowledged else self._retention
        counts = (len(write.extensions), len(write.forgotten))
        args: list[object] = [
            self.term,
            write.done,
            int(write.repair),
            expiry,
            repr(now),
            *counts,
            record.total,
        ]
        for chunk in write.extensions:
            args += (chunk.index, chunk.number, chunk.begin, chunk.end, chunk.payload)
        args += write.forgotten
        for each in write.ended:
            args += (each.index, each.cursor, each.head.chunks, each.head.tokens, each.rest)
        return keys, args


def typed(reply: Any) -> Any:
    """Return the error of a script as an exception of its type; any other reply as it is."""
    if isinstance(reply, ResponseError):
        for prefix, kind in (("FENCED", Fenced), ("GONE", BatchGone), ("HOLE", JournalHole)):
            if str(reply).startswith(prefix):
                return kind(str(reply))
    return reply


def text(value: bytes | str) -> str:
    """Return a text of Redis."""
    return value.decode() if isinstance(value, bytes) else value


def number(value: bytes | str | None) -> float | None:
    """Return a number of Redis; None if there is none."""
    return float(value) if value else None


async def serialised(request: pb.SubmitRolloutsRequest) -> tuple[bytes, str]:
    """Return a request as bytes, and a digest of all its fields, which identifies repetitions of the request."""
    if request.ByteSize() < _LARGE_BYTES:
        return _serialise(request)
    return await asyncio.to_thread(_serialise, request)


def _serialise(request: pb.SubmitRolloutsRequest) -> tuple[bytes, str]:
    payload = request.SerializeToString(deterministic=True)
    return payload, hashlib.sha256(payload).hexdigest()


def merged(request: bytes, additions: list[bytes]) -> pb.SubmitRolloutsRequest:
    """Return a recorded request with the groups that were added to it."""
    # Protobuf appends repeated fields.
    return pb.SubmitRolloutsRequest.FromString(b"".join((request, *additions)))


async def read_heads(redis: Any, names: BatchKeys, indexes: Sequence[int]) -> dict[int, Head]:
    """Return the heads of the samples that have chunks."""
    found = {}
    for begin in range(0, len(indexes), _READ_FIELDS):
        part = indexes[begin : begin + _READ_FIELDS]
        for index, head in zip(part, await redis.hmget(names.chunks, part), strict=True):
            if head is not None:
                found[index] = Head.parse(head.decode())
    return found


async def read_chunks(redis: Any, names: BatchKeys, heads: Mapping[int, Head]) -> list[PartialSample]:
    """Return the samples with their chunks; leave out those with a missing chunk."""
    found = []
    for part in _read_parts(heads):
        fields = [f"{index}:{number}" for index, head in part for number in range(head.chunks)]
        values = iter(await redis.hmget(names.chunks, fields))
        for index, head in part:
            chunks = [next(values) for _ in range(head.chunks)]
            if None not in chunks:
                found.append(PartialSample(index, head, b"".join(chunks)))
    return found


async def read_ended(redis: Any, names: BatchKeys, indexes: Sequence[int]) -> list[bytes | None]:
    """Return the serialised samples with these indexes, None for an incomplete one."""
    pipe = redis.pipeline(transaction=False)
    for name in (names.events, names.done, names.chunks):
        pipe.hmget(name, indexes)
    payloads, done, chunked = await pipe.execute()
    heads = {}
    for place, index in enumerate(indexes):
        _, head = cursor_and_head(done[place]) if done[place] else (0, WHOLE)
        if head.chunks and chunked[place] == str(head).encode():
            heads[index] = head
        elif head.chunks or not done[place]:
            payloads[place] = None
    chunks = {each.index: each.payload for each in await read_chunks(redis, names, heads)}
    for place, index in enumerate(indexes):
        if payloads[place] is not None and index in heads:
            payloads[place] = chunks[index] + payloads[place] if index in chunks else None
    return list(payloads)


def cursor_and_head(value: bytes) -> tuple[int, Head]:
    """Parse the cursor and the head of a sample that has ended."""
    cursor, head = value.decode().split(":", 1)
    return int(cursor), Head.parse(head)


def parse_ended(done: bytes, events: bytes) -> tuple[dict[int, int], dict[int, Head], list[int]]:
    """Parse the entries of all ended samples (`done`) and the indexes that have an event (`events`).

    Returns the cursors, the heads, and the ended samples with an event.
    """
    values, cursors, heads = done.split(), {}, {}
    for index, value in zip(map(int, values[::2]), values[1::2], strict=True):
        cursors[index], heads[index] = cursor_and_head(value)
    return cursors, heads, [index for index in map(int, events.split()) if index in heads]


def _read_parts(heads: Mapping[int, Head]) -> Iterator[list[tuple[int, Head]]]:
    """Yield parts of at most `_READ_TOKENS` tokens, or of one longer sample."""
    part: list[tuple[int, Head]] = []
    tokens = 0
    for index, head in heads.items():
        if part and tokens + head.tokens > _READ_TOKENS:
            yield part
            part, tokens = [], 0
        part.append((index, head))
        tokens += head.tokens
    if part:
        yield part


def cancelled_indexes(record: BatchRecord, keys: Iterable[pb.SampleKey]) -> list[int]:
    """Return the indexes of these samples, without unknown ones; if `keys` is empty, of all samples."""
    wanted = list(keys)
    if not wanted:
        return list(range(record.total))
    found = (record.index_of(key.prompt_id, key.slot) for key in wanted)
    return [index for index in found if index is not None]


def _flag(value: bool) -> str:
    return "1" if value else ""
