"""Hints of all runs: kept while they are of use, and stored in Redis for the next gateway.

A loss in the store costs idle time only, so nothing is fenced, and what cannot be written is written later or
never.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import structlog
from redis.asyncio import Redis

from paceline.v1 import rollout_pb2
from paceline.v1 import rollout_pb2 as pb
from services.contracts.gateway_keys import GatewayKeys
from services.gateway.batches.rollout_batch import RolloutBatch
from services.gateway.config import GatewayConfig
from services.gateway.dispatch.running_batch import ActiveBatches
from services.gateway.hints.book import HintBook, HintOutcome, make_hint
from services.gateway.metrics import GatewayMetrics
from services.platform.redis.connection import OUTAGES

log = structlog.get_logger(__name__)

# Field of the step that began last; all other fields are steps.
_BEGUN = "begun"
# Seconds until a failed write is repeated, and between searches for idle runs.
_PAUSE = 1.0
# Bytes of a message to the coordinator besides its hint.
_OVERHEAD_BYTES = 4096


@dataclass(slots=True)
class StoredRun:
    """Stored hints of one run, with the step that began last and its policy version."""

    run_id: str
    begun: tuple[int, int] | None = None
    hints: list[rollout_pb2.HintNextBatchRequest] = field(default_factory=list)


class HintStore:
    """Storage with one hash for each run, which expires `seconds` after the last write.

    Methods raise what Redis raises, and may be repeated.
    """

    def __init__(self, redis: Redis, namespace: str, seconds: float) -> None:
        self._redis: Any = redis
        self._keys = GatewayKeys(namespace)
        self._seconds = max(1, int(seconds))

    async def put(self, request: rollout_pb2.HintNextBatchRequest) -> None:
        """Record a hint, in place of an earlier one for its step."""
        await self._write(request.run_id, {str(request.step): request.SerializeToString()}, ())

    async def begin(self, run_id: str, begun: tuple[int, int] | None, dropped: Iterable[int]) -> None:
        """Record the step of the run that began last, with its version, and remove hints."""
        values = {} if begun is None else {_BEGUN: f"{begun[0]}:{begun[1]}"}
        await self._write(run_id, values, dropped)

    async def forget(self, run_id: str) -> None:
        """Remove a run."""
        pipe = self._redis.pipeline(transaction=False)
        pipe.delete(self._keys.hints(run_id))
        pipe.srem(self._keys.hinted, run_id)
        await pipe.execute()

    async def load(self) -> list[StoredRun]:
        """Return all runs, and take those that have expired off the list."""
        found = []
        for name in sorted(await self._redis.smembers(self._keys.hinted)):
            run_id = name.decode()
            stored = await self._redis.hgetall(self._keys.hints(run_id))
            if stored:
                found.append(_read(run_id, stored))
            else:
                await self._redis.srem(self._keys.hinted, run_id)
        return found

    async def _write(self, run_id: str, values: dict[str, Any], dropped: Iterable[int]) -> None:
        key = self._keys.hints(run_id)
        pipe = self._redis.pipeline(transaction=False)
        # Listed first: what is stored but not listed would never be found.
        pipe.sadd(self._keys.hinted, run_id)
        if values:
            pipe.hset(key, mapping=values)
        if steps := [str(step) for step in dropped]:
            pipe.hdel(key, *steps)
        pipe.expire(key, self._seconds)
        await pipe.execute()


def _read(run_id: str, stored: dict[bytes, bytes]) -> StoredRun:
    run = StoredRun(run_id)
    for name, value in stored.items():
        if name.decode() == _BEGUN:
            step, version = value.decode().split(":")
            run.begun = int(step), int(version)
        else:
            run.hints.append(rollout_pb2.HintNextBatchRequest.FromString(value))
    return run


@dataclass(eq=False)
class Hinting:
    """Hints of all runs, for one term of leadership. Call `recover`, then `run`."""

    config: GatewayConfig
    book: HintBook
    store: HintStore
    batches: ActiveBatches
    metrics: GatewayMetrics
    # Run id -> steps whose hints are to be removed from the store, with the step that began last.
    _unsaved: dict[str, set[int]] = field(init=False, default_factory=dict)
    _forgotten: set[str] = field(init=False, default_factory=set)
    _wake: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    # Held while something is written, so that a hint and the removal of its predecessor keep their order.
    _writing: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)

    async def recover(self) -> None:
        """Restore the hints of former terms. Raises what Redis raises."""
        now = time.time()
        for stored in await self.store.load():
            if stored.begun is not None:
                self.book.begin(stored.run_id, *stored.begun, now)
            for request in stored.hints:
                self.book.put(await asyncio.to_thread(make_hint, request), now)
        self._changed()

    async def hint(self, request: pb.HintNextBatchRequest) -> int:
        """Keep a valid hint; return how many samples may be pre-generated for it, 0 if it is not kept."""
        outcome, samples = await self._take(request)
        self.metrics.hints.labels(outcome.value).inc()
        log.info("hint", run=request.run_id, step=request.step, outcome=outcome.value, samples=samples)
        if outcome is not HintOutcome.KEPT:
            return 0
        self._changed()
        async with self._writing:
            self._unsaved.get(request.run_id, set()).discard(request.step)
            try:
                await self.store.put(request)
            except OUTAGES as error:
                # It is used all the same; only a restart would forget it.
                log.warning("hint_not_stored", run=request.run_id, step=request.step, error=str(error))
        return samples

    def begin(self, batch: RolloutBatch) -> None:
        """Drop the hints for the step of a batch that begins, and for those before it."""
        run_id = batch.key[0]
        passed = self.book.begin(run_id, batch.step, batch.policy_version, time.time())
        self._forgotten.discard(run_id)
        self._drop_later(run_id, passed)
        self._changed()

    def resume(self, batch: RolloutBatch) -> None:
        """Do as `begin` for a batch that is resumed: a later step may have begun since."""
        run = self.book.runs.get(batch.key[0])
        if run is None or run.step is None or run.step < batch.step:
            self.begin(batch)

    def reach(self, batch: RolloutBatch) -> None:
        """Do as `resume` for a sample of a Generate call, if there are hints of its run.

        An unannounced step that consists of such samples is counted here.
        """
        run_id, step = batch.key[0], batch.step
        if self.book.is_first(run_id, step) and not self.book.is_hinted(run_id, step):
            self.metrics.unannounced.inc()
        if run_id in self.book.runs:
            self.resume(batch)

    async def forget(self, run_id: str) -> None:
        """Forget a run and its hints at once, since it may begin again under its name."""
        async with self._writing:
            self.book.forget(run_id)
            self._unsaved.pop(run_id, None)
            self._changed()
            try:
                await self.store.forget(run_id)
            except OUTAGES:
                self._forgotten.add(run_id)

    async def run(self) -> None:
        """Store what has changed, and forget idle runs, until cancelled."""
        looked_at = time.monotonic()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_PAUSE):
                    await self._wake.wait()
            self._wake.clear()
            # By the clock: hints may come more often than that for good.
            if time.monotonic() - looked_at >= _PAUSE:
                looked_at = time.monotonic()
                self._forget_idle()
            try:
                await self._store_changes()
            except OUTAGES as error:
                log.warning("hints_not_stored", error=str(error))
                await asyncio.sleep(_PAUSE)

    async def _take(self, request: pb.HintNextBatchRequest) -> tuple[HintOutcome, int]:
        samples = sum(group.samples for group in request.groups)
        # Checked before there is a seed for each of them.
        if samples > self.config.max_queued_samples:
            return HintOutcome.FULL, samples
        hint = await asyncio.to_thread(make_hint, request)
        if hint.size > self.config.max_message_bytes - _OVERHEAD_BYTES:
            return HintOutcome.FULL, samples
        outcome, surplus = self.book.put(hint, time.time())
        if surplus:
            self._drop_later(request.run_id, surplus)
        return outcome, samples

    def _drop_later(self, run_id: str, steps: list[int]) -> None:
        self._unsaved.setdefault(run_id, set()).update(steps)
        self._wake.set()

    async def _store_changes(self) -> None:
        for run_id in list(self._unsaved):
            async with self._writing:
                run, steps = self.book.runs.get(run_id), self._unsaved.pop(run_id, set())
                begun = (run.step, run.version) if run is not None and run.step is not None else None
                try:
                    await self.store.begin(run_id, begun, steps)
                except OUTAGES:
                    self._unsaved.setdefault(run_id, set()).update(steps)
                    raise
        for run_id in list(self._forgotten):
            await self.store.forget(run_id)
            self._forgotten.discard(run_id)

    def _forget_idle(self) -> None:
        self.metrics.forget_runs(time.time() - self.config.run_idle_seconds)
        busy = {running.batch.key[0] for running in self.batches.by_key.values()}
        for run_id in self.book.idle(time.time() - self.config.run_idle_seconds):
            if run_id not in busy:
                log.info("run_forgotten", run=run_id)
                self.book.forget(run_id)
                self._unsaved.pop(run_id, None)
                self._forgotten.add(run_id)
                self._changed()

    def _changed(self) -> None:
        self.metrics.hinted.set(self.book.samples())
        self.batches.progress.set()
