"""Carries what batches have gained into the journal, many changes per round trip.

One writer serves all batches. While a round trip is under way further changes gather in the batches, so
its size follows the load and no link ever waits for Redis. In an outage it tries again with growing
pauses, for ever: writes may be repeated, and what is not written is not delivered.
"""

import asyncio
import time
from collections.abc import Callable

import structlog
from redis.exceptions import RedisError

from services.gateway.assemble import Write, collect
from services.gateway.batch import Batch, BatchKey
from services.gateway.journal import Fenced, Gone, Journal
from services.gateway.metrics import GatewayMetrics

log = structlog.get_logger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0


class JournalWriter:
    """`written` is told the number of events that a batch now has in the journal; `gone` of a batch that
    Redis has lost. `run` ends with Fenced when another gateway has taken over."""

    def __init__(
        self,
        journal: Journal,
        metrics: GatewayMetrics,
        written: Callable[[BatchKey, int], None],
        gone: Callable[[BatchKey, str], None],
    ) -> None:
        self._journal = journal
        self._metrics = metrics
        self._written = written
        self._gone = gone
        self._changed: dict[BatchKey, Batch] = {}
        self._wake = asyncio.Event()

    def touch(self, batch: Batch) -> None:
        """The batch has tokens or endings that the journal has not."""
        self._changed[batch.key] = batch
        self._wake.set()

    async def run(self) -> None:
        """Writes until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            changed, self._changed = self._changed, {}
            writes = [write for write in map(collect, changed.values()) if write]
            while writes:
                writes = await self._attempt(writes)

    async def _attempt(self, writes: list[Write]) -> list[Write]:
        """One round trip, repeated until Redis answers. Returns the writes that it would not take."""
        pause = FIRST_PAUSE
        while True:
            begin = time.perf_counter()
            try:
                replies = await self._journal.write(writes, time.time())
                break
            except RedisError as error:
                log.warning("journal_unreachable", error=str(error), writes=len(writes), retry_in=pause)
                self._metrics.journal_errors.inc()
                await asyncio.sleep(pause)
                pause = min(pause * 2, LONGEST_PAUSE)
        self._metrics.journal_seconds.observe(time.perf_counter() - begin)
        again = [write for write, reply in zip(writes, replies, strict=True) if self._settle(write, reply)]
        if again:
            await asyncio.sleep(LONGEST_PAUSE)
        return again

    def _settle(self, write: Write, reply: list[int] | Exception) -> bool:
        """Tells the outcome of one write; True when it must be tried again."""
        if isinstance(reply, Fenced):
            raise reply
        if isinstance(reply, Gone):
            self._gone(write.key, str(reply))
            return False
        if isinstance(reply, Exception):
            log.error("journal_refused", batch=write.key, error=str(reply))
            self._metrics.journal_errors.inc()
            return True
        if reply:
            self._written(write.key, max(reply))
        return False
