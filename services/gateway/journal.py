"""The journal of batches in Redis: what makes a stream resumable and a sample delivered exactly once.

Per batch it holds the request, the tokens so far of every unfinished sample, and the finished samples as
a list in completion order. Nothing is delivered that is not in the list. Reads and writes are small and
may be repeated; whoever calls decides what an outage means. What a Redis server acknowledged and then
lost (one without append-only file, say) the journal cannot bring back: that is told as DATA_LOSS.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from paceline.v1 import rollout_pb2
from services.gateway import scripts
from services.gateway.assemble import Write
from services.gateway.batch import BatchKey
from services.gateway.keys import BatchKeys, GatewayKeys
from services.platform.errors import Unavailable

# Samples whose partial tokens are read in one round trip when a batch is recovered.
_RECOVER_CHUNK = 256


@dataclass(frozen=True, slots=True)
class Known:
    """The record of a batch: `created` by this very call, or known before. `lenience` is the l that its
    samples get, None where the level has none."""

    fingerprint: str
    total: int
    lenience: float | None
    created: bool


@dataclass(frozen=True, slots=True)
class Head:
    """Where a batch stands: samples wanted, events journaled."""

    total: int
    events: int


@dataclass(frozen=True, slots=True)
class Recorded:
    """What was asked for, the l that its samples got, and which of them have ended, by index."""

    request: rollout_pb2.SubmitRolloutsRequest
    lenience: float | None
    done: frozenset[int]


@dataclass(frozen=True, slots=True)
class Partial:
    """Journaled tokens (packed uint32) and log-probabilities (packed float32) of an unfinished sample."""

    index: int
    tokens: bytes
    logprobs: bytes


@dataclass(frozen=True, slots=True)
class Recovered:
    """All that the journal knows of a batch."""

    request: rollout_pb2.SubmitRolloutsRequest
    accepted_at: float
    lenience: float | None
    total: int
    done: frozenset[int]
    cancels: list[rollout_pb2.CancelRolloutsRequest]
    partials: list[Partial]


class Fenced(Unavailable):
    """Another gateway has taken over."""


class Gone(Exception):
    """Redis has lost the batch."""


def fingerprint(request: rollout_pb2.SubmitRolloutsRequest) -> str:
    """What two requests under one batch id must share: every field."""
    return hashlib.sha256(request.SerializeToString(deterministic=True)).hexdigest()


class Journal:
    """Reads and writes the journal as `owner`, the holder of the lease."""

    def __init__(self, redis: Redis, namespace: str, owner: str, retention_seconds: float) -> None:
        self._redis: Any = redis
        self._namespace = namespace
        self._owner = owner
        self._retention = int(retention_seconds)
        self._keys = GatewayKeys(namespace)

    async def create(
        self, request: rollout_pb2.SubmitRolloutsRequest, accepted_at: float, lenience: float | None = None
    ) -> Known:
        """Records a batch, unless one of this id is known already."""
        key = (request.run_id, request.batch_id)
        total = sum(group.samples for group in request.groups)
        pipe = self._redis.pipeline(transaction=False)
        # Listed first: a batch that is recorded but not listed would never be resumed.
        pipe.sadd(self._keys.batches, ":".join(key))
        meta = BatchKeys.of(self._namespace, key).meta
        payload = request.SerializeToString(deterministic=True)
        chosen = "" if lenience is None else repr(lenience)
        args = (self._owner, fingerprint(request), payload, repr(accepted_at), total, chosen)
        pipe.eval(scripts.CREATE, 1, meta, *args)
        _, (known, recorded_total, recorded_lenience, created) = await pipe.execute()
        return Known(_text(known), int(recorded_total), _number(recorded_lenience), bool(created))

    async def known(self, key: BatchKey) -> Known | None:
        """The record of a batch, if there is one. Fenced when another gateway has the lease."""
        pipe = self._redis.pipeline(transaction=False)
        pipe.hmget(BatchKeys.of(self._namespace, key).meta, "fingerprint", "total", "lenience")
        pipe.get(self._keys.lease)
        (recorded, total, lenience), holder = await pipe.execute()
        self._check_holder(holder)
        if recorded is None:
            return None
        return Known(_text(recorded), int(total), _number(lenience), created=False)

    async def write(self, writes: Sequence[Write], now: float) -> list[list[int] | Exception]:
        """Writes all in one round trip, each batch atomically; per batch the cursors of its ended
        samples, or why it could not be written (Fenced, Gone, or what Redis said)."""
        pipe = self._redis.pipeline(transaction=False)
        for write in writes:
            keys, args = self._write_arguments(write, now)
            pipe.eval(scripts.WRITE, len(keys), *keys, *args)
        replies = await pipe.execute(raise_on_error=False)
        return [_judge(reply) for reply in replies]

    async def events(self, key: BatchKey, cursor: int, count: int) -> list[bytes]:
        """Up to `count` serialised samples after `cursor`."""
        name = BatchKeys.of(self._namespace, key).events
        found: list[bytes] = await self._redis.lrange(name, cursor, cursor + count - 1)
        return found

    async def head(self, key: BatchKey) -> Head | None:
        """Where the batch stands; None when it is not known (any more)."""
        keys = BatchKeys.of(self._namespace, key)
        pipe = self._redis.pipeline(transaction=False)
        pipe.hget(keys.meta, "total")
        pipe.llen(keys.events)
        total, events = await pipe.execute()
        return None if total is None else Head(int(total), events)

    async def recorded(self, key: BatchKey) -> Recorded | None:
        """What was asked for and what of it has ended; None when it is not known (any more)."""
        keys = BatchKeys.of(self._namespace, key)
        pipe = self._redis.pipeline(transaction=False)
        pipe.hmget(keys.meta, "request", "lenience")
        pipe.hkeys(keys.done)
        (request, lenience), done = await pipe.execute()
        if request is None:
            return None
        parsed = rollout_pb2.SubmitRolloutsRequest.FromString(request)
        return Recorded(parsed, _number(lenience), frozenset(map(int, done)))

    async def cancel(self, request: rollout_pb2.CancelRolloutsRequest) -> None:
        """Records a cancellation, so that a restart does not forget it."""
        keys = BatchKeys.of(self._namespace, (request.run_id, request.batch_id))
        await self._redis.rpush(keys.cancels, request.SerializeToString())

    async def unfinished(self) -> list[BatchKey]:
        """The batches that are listed as unfinished."""
        names = await self._redis.smembers(self._keys.batches)
        pairs = (_text(name).split(":", 1) for name in names)
        return sorted((run_id, batch_id) for run_id, batch_id in pairs)

    async def unlist(self, key: BatchKey) -> None:
        """Takes a batch off the list of unfinished ones."""
        await self._redis.srem(self._keys.batches, ":".join(key))

    async def adopt(self, key: BatchKey) -> Recovered | None:
        """Makes this gateway the owner of a batch and reads it; None when there is nothing left of it.
        Fenced when another gateway has the lease."""
        self._check_holder(await self._redis.get(self._keys.lease))
        keys = BatchKeys.of(self._namespace, key)
        request, accepted_at, lenience, total = await self._redis.hmget(
            keys.meta, "request", "accepted_at", "lenience", "total"
        )
        if request is None:
            return None
        # From here on a former owner can write nothing any more, so what is read next stays true.
        await self._redis.hset(keys.meta, "owner", self._owner)
        pipe = self._redis.pipeline(transaction=False)
        pipe.hkeys(keys.done)
        pipe.lrange(keys.cancels, 0, -1)
        done_fields, cancels = await pipe.execute()
        done = frozenset(int(index) for index in done_fields)
        return Recovered(
            rollout_pb2.SubmitRolloutsRequest.FromString(request),
            float(accepted_at),
            _number(lenience),
            int(total),
            done,
            [rollout_pb2.CancelRolloutsRequest.FromString(cancel) for cancel in cancels],
            await self._partials(keys, [index for index in range(int(total)) if index not in done]),
        )

    def _check_holder(self, holder: bytes | None) -> None:
        if holder is not None and _text(holder) != self._owner:
            raise Fenced(f"the lease belongs to {_text(holder)}")

    async def _partials(self, keys: BatchKeys, indexes: Sequence[int]) -> list[Partial]:
        found = []
        for begin in range(0, len(indexes), _RECOVER_CHUNK):
            chunk = indexes[begin : begin + _RECOVER_CHUNK]
            pipe = self._redis.pipeline(transaction=False)
            for index in chunk:
                pipe.mget(*keys.partial(index))
            for index, (tokens, logprobs) in zip(chunk, await pipe.execute(), strict=True):
                if tokens and logprobs:
                    found.append(Partial(index, tokens, logprobs))
        return found

    def _write_arguments(self, write: Write, now: float) -> tuple[list[str], list[object]]:
        names = BatchKeys.of(self._namespace, write.key)
        keys = [names.meta, names.events, names.done, names.cancels]
        args: list[object] = [self._owner, self._retention, repr(now), len(write.extensions)]
        for extension in write.extensions:
            keys += names.partial(extension.index)
            args += (extension.offset, extension.tokens, extension.logprobs)
        for ended in write.ended:
            keys += names.partial(ended.index)
            args += (ended.index, ended.payload)
        return keys, args


def _judge(reply: object) -> list[int] | Exception:
    if isinstance(reply, ResponseError) and str(reply).startswith(("FENCED", "GONE")):
        return Fenced(str(reply)) if str(reply).startswith("FENCED") else Gone(str(reply))
    if isinstance(reply, Exception):
        return reply
    assert isinstance(reply, list)
    return [int(cursor) for cursor in reply]


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _number(value: bytes | str | None) -> float | None:
    return float(value) if value else None
