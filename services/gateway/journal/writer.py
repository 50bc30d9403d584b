"""Write new tokens and finished samples into the journal, many changes per round trip, with backpressure.

One writer serves all batches. Between two round trips changes gather in the batches, so the size of a round trip
follows the load and no link ever waits for Redis. In an outage the writer retries indefinitely, with growing
delays: writes may be repeated, and samples are delivered only once they are written. A batch that Redis refuses has
its own delay and does not block others.

If too many bytes wait for Redis, work pauses (`JournalBacklog`). If Redis is nearly full, no new batch is accepted,
so that the accepted ones can end (`RedisHeadroom`).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from services.contracts.errors import ResourceExhausted
from services.contracts.gateway_keys import BatchKey
from services.gateway.journal.fenced_records import Fenced
from services.gateway.journal.journal import BatchGone, Journal, JournalHole
from services.gateway.journal.record import (
    BatchRecord,
    JournalWrite,
    RecordedBatches,
    collect,
    has_more,
    settle,
    undo,
)
from services.gateway.metrics import GatewayMetrics
from services.gateway.state.rollout_batch import RolloutBatch
from services.platform.tasks import ExponentialBackoff, Notifier, is_cancelled

log = structlog.get_logger(__name__)

_RETRY_AFTER = 5.0
_MEMORY_CHECK_SECONDS = 1.0
FIRST_DELAY, LONGEST_DELAY = 0.05, 2.0
# Bytes of a token and its log-probability in memory.
_TOKEN_BYTES = 8
# Bytes of one round trip, and bytes that are serialised in one turn of the event loop, which takes milliseconds.
_MOST_BYTES, _TURN_BYTES = 1 << 20, 32 << 10
# Seconds from one round trip to the next: each costs as much as several samples in it.
_PAUSE = 0.02


class JournalWriter:
    """Queue of changed batches, and the task that writes them."""

    def __init__(
        self,
        journal: Journal,
        records: RecordedBatches,
        backlog: JournalBacklog,
        metrics: GatewayMetrics,
        least_tokens: int,
    ) -> None:
        """Write an unfinished sample once it has gained `least_tokens` tokens since the last write."""
        self._journal = journal
        self._backlog = backlog
        self._least_tokens = least_tokens
        self._records = records
        self._metrics = metrics
        self._due: dict[BatchKey, None] = {}
        # Batches that changed and are not all written, or that Redis refused.
        self._lanes: dict[BatchKey, _Lane] = {}
        self._refused: dict[BatchKey, asyncio.TimerHandle] = {}
        self._wake = asyncio.Event()
        # Set if the next round trip must not wait for further changes.
        self._hurry = asyncio.Event()

    def touch(self, batch: RolloutBatch) -> None:
        """Write new tokens and endings of a batch; its last ending at once, if no other batch has changes."""
        lane = self._lanes.get(batch.key)
        if lane is None or lane.batch is not batch:
            self._remove(batch.key)
            lane = self._lanes[batch.key] = _Lane(batch)
            self._stop_waiting(batch.key)
        self._weigh(lane)
        if batch.key not in self._refused:
            self._make_due(batch.key)
            # Its trainer waits only for this. With many ending batches, each would have a separate round trip.
            if batch.is_done() and len(self._lanes) == 1:
                self._hurry.set()

    async def run(self, reader: JournalReader) -> None:
        """Write until cancelled. Raises Fenced when another gateway leads."""
        loop = asyncio.get_running_loop()
        try:
            rested_at = 0.0
            while True:
                await self._wake.wait()
                await self._rest(rested_at - loop.time())
                begun_at = loop.time()
                self._wake.clear()
                self._hurry.clear()
                pieces = await self._collect()
                if not pieces:
                    continue
                # Full round trips follow without a pause: it limits their number, not the bytes per second.
                filled = sum(write.nbytes for _, write, _ in pieces) / _MOST_BYTES
                rested_at = begun_at + _PAUSE * max(0.0, 1.0 - filled)
                replies = await self._write([(write, record) for _, write, record in pieces])
                for (lane, write, record), reply in zip(pieces, replies, strict=True):
                    if self._lanes.get(write.key) is lane:
                        await self._follow(lane, write, record, reply, reader)
        finally:
            for timer in self._refused.values():
                timer.cancel()

    async def _rest(self, seconds: float) -> None:
        """Wait `seconds` for further changes, or until `_hurry` is set; yield to the event loop in any case."""
        if seconds <= 0.0:
            await asyncio.sleep(0)
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._hurry.wait()

    async def _collect(self) -> list[tuple[_Lane, JournalWrite, BatchRecord]]:
        pieces, nbytes, in_turn = [], 0, 0
        for key in list(self._due):
            if nbytes >= _MOST_BYTES:
                self._wake.set()
                break
            del self._due[key]
            lane, record = self._lanes.get(key), self._records.get(key)
            if lane is None:
                continue
            if record is not None and lane.write is None:
                lane.write = collect(lane.batch, record, self._least_tokens) or None
            if record is None or lane.write is None:
                self._remove(key)
                continue
            self._weigh(lane)
            pieces.append((lane, lane.write, record))
            nbytes += lane.write.nbytes
            in_turn += lane.write.nbytes
            if in_turn >= _TURN_BYTES:
                in_turn = 0
                await asyncio.sleep(0)
        return pieces

    async def _follow(
        self, lane: _Lane, write: JournalWrite, record: BatchRecord, reply: Any, reader: JournalReader
    ) -> None:
        if isinstance(reply, Fenced):
            await self._check_lease()
            log.error("batch_taken", batch=write.key, reason=str(reply))
            self._remove(write.key)
            reader.taken(write.key)
        elif isinstance(reply, JournalHole):
            log.warning("journal_hole", batch=write.key, reason=str(reply))
            self._metrics.journal_holes.labels("gone" if isinstance(reply, BatchGone) else "hole").inc()
            await self._repair(lane, write, record, reader)
        elif isinstance(reply, Exception):
            log.error("journal_refused", batch=write.key, error=str(reply))
            self._metrics.journal_errors.inc()
            self._try_later(lane)
        else:
            lane.backoff.succeeded()
            lane.write = None
            self._metrics.journal_holes.labels("torn").inc(len(reply))
            torn = [int(index) for index in reply]
            settle(lane.batch, record, write, torn)
            durable = [(each.index, float(each.end)) for each in write.extensions if each.index not in torn]
            reader.extended(write.key, [*durable, *((each.index, math.inf) for each in write.ended)])
            for ended in write.ended:
                if ended.payload:
                    self._records.keep(write.key, ended.index, ended.payload)
            self._metrics.journal_chunks.inc(len(write.extensions))
            self._weigh(lane)
            if has_more(lane.batch, record):
                self._make_due(write.key)
            else:
                self._remove(write.key)
            if write.ended or write.repair:
                reader.journaled(write.key, record.safe)

    async def _repair(
        self, lane: _Lane, write: JournalWrite, record: BatchRecord, reader: JournalReader
    ) -> None:
        """Compare the record with Redis; rewrite what is in memory and regenerate the rest."""
        try:
            there = await self._journal.look(record)
            if there is None:
                self._remove(write.key)
                return
        except Fenced as fenced:
            await self._follow(lane, write, record, fenced, reader)
            return
        except RedisError as error:
            log.warning("journal_unreachable", error=str(error))
            self._metrics.journal_errors.inc()
            self._try_later(lane)
            return
        undo(lane.batch, write)
        lane.write = None
        lost = record.reconcile(there, lambda index: self._records.kept(write.key, index))
        self._weigh(lane)
        self._make_due(write.key)
        if lost:
            reader.reopen(write.key, lost)
        reader.journaled(write.key, record.safe)

    async def _check_lease(self) -> None:
        try:
            await self._journal.check_lease()
        except RedisError as error:
            log.warning("journal_unreachable", error=str(error))

    def _weigh(self, lane: _Lane) -> None:
        """Update the backlog by the bytes of a batch that have ended and are not written."""
        record = self._records.get(lane.batch.key)
        nbytes = _TOKEN_BYTES * lane.batch.ended_tokens + (0 if record is None else record.unwritten_bytes)
        self._backlog.add(nbytes - lane.nbytes)
        lane.nbytes = nbytes

    def _remove(self, key: BatchKey) -> None:
        lane = self._lanes.pop(key, None)
        if lane is not None:
            self._backlog.add(-lane.nbytes)

    def _make_due(self, key: BatchKey) -> None:
        self._due[key] = None
        self._wake.set()

    def _try_later(self, lane: _Lane) -> None:
        key = lane.batch.key
        loop = asyncio.get_running_loop()
        self._refused[key] = loop.call_later(lane.backoff.failed(), self._try_again, key)

    def _try_again(self, key: BatchKey) -> None:
        self._stop_waiting(key)
        self._make_due(key)

    def _stop_waiting(self, key: BatchKey) -> None:
        timer = self._refused.pop(key, None)
        if timer is not None:
            timer.cancel()

    async def _write(self, pieces: list[tuple[JournalWrite, BatchRecord]]) -> list[Any]:
        """Make one round trip, repeated until Redis answers; return the reply to each piece."""
        backoff = ExponentialBackoff(FIRST_DELAY, LONGEST_DELAY)
        while True:
            begin = time.perf_counter()
            try:
                replies = await self._journal.write(pieces, time.time())
            except RedisError as error:
                delay = backoff.failed()
                log.warning("journal_unreachable", error=str(error), writes=len(pieces), retry_in=delay)
                self._metrics.journal_errors.inc()
                await asyncio.sleep(delay)
            else:
                self._metrics.journal_seconds.observe(time.perf_counter() - begin)
                return replies


class JournalReader(Protocol):
    """Receiver of the writer's progress."""

    def journaled(self, key: BatchKey, events: int) -> None:
        """Record that `events` finished samples of the batch are durable."""

    def extended(self, key: BatchKey, tokens: Iterable[tuple[int, float]]) -> None:
        """Record the number of durable tokens of samples, as (index, tokens); inf: all, with the end."""

    def reopen(self, key: BatchKey, indexes: list[int]) -> None:
        """Generate ended samples again, since the journal has lost them."""

    def taken(self, key: BatchKey) -> None:
        """Drop a batch that a successor has taken over."""


@dataclass(eq=False, slots=True)
class _Lane:
    """One batch on its way into the journal, with the write that Redis has not answered yet."""

    batch: RolloutBatch
    write: JournalWrite | None = None
    # Bytes of the batch that are counted in the backlog.
    nbytes: int = 0
    backoff: ExponentialBackoff = field(
        default_factory=lambda: ExponentialBackoff(FIRST_DELAY, LONGEST_DELAY)
    )


class JournalBacklog:
    """Bytes of ended samples that are not in the journal, as its writer counts them.

    Above `most_bytes` work is paused until at most half of that is left: the gateway sends instances nothing and
    reads nothing from them. What they generate meanwhile stays with them.
    """

    def __init__(self, most_bytes: int, metrics: GatewayMetrics) -> None:
        self.nbytes = 0
        self.paused = False
        self.changed = Notifier()
        """Notified when a pause begins or ends."""
        self._most_bytes = most_bytes
        metrics.unwritten.set_function(lambda: self.nbytes / most_bytes)
        metrics.paused.set_function(lambda: self.paused)

    def add(self, nbytes: int) -> None:
        """Add bytes, or subtract them if negative."""
        if not nbytes:
            return
        self.nbytes += nbytes
        paused = self.nbytes > (self._most_bytes // 2 if self.paused else self._most_bytes)
        if paused != self.paused:
            self.paused = paused
            log.warning("instances_paused" if paused else "instances_resumed", unwritten_bytes=self.nbytes)
            self.changed.notify()

    def check(self) -> None:
        """Check that work is not paused. ResourceExhausted in a pause."""
        if self.paused:
            raise ResourceExhausted(
                "unwritten_bytes",
                f"{self.nbytes} bytes of finished samples wait for Redis; new batches are accepted when half of "
                f"{self._most_bytes} are left",
                retry_after=_RETRY_AFTER,
            )

    def clear(self) -> None:
        """Reset the count, since the term is over."""
        self.add(-self.nbytes)


class RedisHeadroom:
    """Used share of Redis' memory, read every second by `run`.

    Batches are refused above `most`, and while `backlog` is paused.
    """

    def __init__(self, redis: Redis, most: float, backlog: JournalBacklog, metrics: GatewayMetrics) -> None:
        self._redis: Any = redis
        self._most = most
        self._backlog = backlog
        self._metrics = metrics
        self._share = 0.0

    def check(self) -> None:
        """Check that there is room for another batch. ResourceExhausted if there is none."""
        self._backlog.check()
        if self._share > self._most:
            raise ResourceExhausted(
                "redis_memory",
                f"Redis uses {self._share:.0%} of its memory; new batches are accepted below {self._most:.0%}. "
                "Acknowledged samples leave it",
                retry_after=_RETRY_AFTER,
            )

    async def run(self) -> None:
        """Read until cancelled."""
        while not is_cancelled():
            try:
                self._share = used_share(await self._redis.info("memory"))
                self._metrics.redis_memory.set(self._share)
            except RedisError as error:
                log.debug("memory_unknown", error=str(error))
            await asyncio.sleep(_MEMORY_CHECK_SECONDS)


def used_share(info: dict[str, Any]) -> float:
    """Return used memory over `maxmemory` from the reply to INFO memory; 0 if there is no limit.

    A cluster replies for each node: the result is then the share of the fullest node.
    """
    nodes = [each for each in info.values() if isinstance(each, dict)] or [info]
    limited = [(int(node.get("used_memory", 0)), int(node.get("maxmemory", 0))) for node in nodes]
    return max((used / most for used, most in limited if most), default=0.0)
