"""Hints of coming steps by run, with a copy in Redis for the next gateway.

A hint is kept until its step begins or is passed. It is refused if its step has begun, if it is not among the
nearest `max_steps`, or if there is no room. That is no error: a missing hint costs idle time at most, so it must
never stop a trainer. For the same reason nothing in Redis is fenced, and a failed write is repeated later or
dropped. `HintBook` is pure: times are passed in (unix seconds).
"""

from __future__ import annotations

import asyncio
import enum
import hashlib
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import structlog
from redis.asyncio import Redis

from paceline.internal.v1 import bubble_pb2
from paceline.v1 import rollout_pb2
from paceline.v1 import rollout_pb2 as pb
from services.contracts.gateway_keys import GatewayKeys
from services.contracts.seeds import sample_seed
from services.gateway.config import GatewayConfig
from services.gateway.metrics import GatewayMetrics
from services.gateway.scheduler.active_batches import ActiveBatches
from services.gateway.state.messages import exactness_of, has_coupled_history
from services.gateway.state.rollout_batch import RolloutBatch
from services.platform.redis.connection import OUTAGES

log = structlog.get_logger(__name__)

# Field of the step that began last; all other fields are named after steps.
_BEGUN_FIELD = "begun"
# Seconds until a failed write is repeated, and between searches for idle runs.
_RETRY_SECONDS = 1.0
# Bytes of a message to the coordinator in addition to its hint.
_OVERHEAD_BYTES = 4096


class HintOutcome(enum.StrEnum):
    """Outcome of a hint."""

    KEPT = "kept"
    # Its step has begun.
    LATE = "late"
    # `max_steps` nearer steps are hinted already.
    FAR = "far"
    # No room.
    FULL = "full"


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
    # Held during writes, so that a hint and the removal of its predecessor keep their order.
    _writing: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)

    async def recover(self) -> None:
        """Restore the hints of former terms. Raises the errors of Redis."""
        now = time.time()
        for stored in await self.store.load():
            if stored.begun is not None:
                self.book.begin(stored.run_id, *stored.begun, now)
            for request in stored.hints:
                self.book.put(await asyncio.to_thread(make_hint, request), now)
        self._changed()

    async def hint(self, request: pb.HintNextBatchRequest) -> int:
        """Keep a valid hint; return the number of samples that may be pre-generated for it, 0 if it is refused."""
        outcome, samples = await self._take(request)
        self.metrics.hints.labels(outcome.value).inc()
        log.info("hint", run=request.run_id, step=request.step, outcome=outcome.value, samples=samples)
        if outcome is not HintOutcome.KEPT:
            return 0
        self._changed()
        async with self._writing:
            self._unsaved.get(request.run_id, set()).discard(request.step)
            try:
                await self.store.write(request.run_id, hint=request)
            except OUTAGES as error:
                # The hint still works; only a restart would forget it.
                log.warning("hint_not_stored", run=request.run_id, step=request.step, error=str(error))
        return samples

    def begin(self, batch: RolloutBatch) -> None:
        """Drop the hints for the step of a batch that begins, and for earlier steps."""
        run_id = batch.key[0]
        passed = self.book.begin(run_id, batch.step, batch.policy_version, time.time())
        self._forgotten.discard(run_id)
        self._drop_later(run_id, passed)
        self._changed()

    def resume(self, batch: RolloutBatch) -> None:
        """Do the same as `begin` for a resumed batch, unless a later step has begun since."""
        run = self.book.runs.get(batch.key[0])
        if run is None or run.step is None or run.step < batch.step:
            self.begin(batch)

    def reach(self, batch: RolloutBatch) -> bool:
        """Do the same as `resume` for a sample of a Generate call, if there are hints of its run.

        Returns True for the first sample of a step that was hinted.
        """
        run_id = batch.key[0]
        hinted = self.book.is_hinted(run_id, batch.step)
        if run_id in self.book.runs:
            self.resume(batch)
        return hinted

    async def forget(self, run_id: str) -> None:
        """Forget a run and its hints at once: another run may begin under its name."""
        async with self._writing:
            self.book.forget(run_id)
            self._unsaved.pop(run_id, None)
            self._changed()
            try:
                await self.store.forget(run_id)
            except OUTAGES:
                self._forgotten.add(run_id)

    async def run(self) -> None:
        """Store changes, and forget idle runs, until cancelled."""
        looked_at = time.monotonic()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_RETRY_SECONDS):
                    await self._wake.wait()
            self._wake.clear()
            # Check the clock: `_wake` may be set more often than once in this time, all the time.
            if time.monotonic() - looked_at >= _RETRY_SECONDS:
                looked_at = time.monotonic()
                self._forget_idle()
            try:
                await self._store_changes()
            except OUTAGES as error:
                log.warning("hints_not_stored", error=str(error))
                await asyncio.sleep(_RETRY_SECONDS)

    async def _take(self, request: pb.HintNextBatchRequest) -> tuple[HintOutcome, int]:
        samples = sum(group.samples for group in request.groups)
        # Check before a seed is computed for each sample.
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
                    await self.store.write(run_id, begun=begun, dropped=steps)
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


class HintBook:
    """Hints of all runs: at most `max_steps` steps each, and at most `max_bytes` bytes in all.

    If there are more than `max_runs` runs, the least recently touched ones count as `idle`.
    """

    def __init__(self, max_steps: int, max_bytes: int, max_runs: int = 10_000) -> None:
        self.runs: dict[str, HintedRun] = {}
        self._max_steps = max_steps
        self._max_bytes = max_bytes
        self._max_runs = max_runs

    def put(self, hint: Hint, now: float) -> tuple[HintOutcome, list[int]]:
        """Keep a hint, and replace an earlier one for its step.

        Returns the outcome, and the steps whose hints were dropped for it.
        """
        run_id = hint.message.run_id
        run = self.runs.get(run_id) or HintedRun(run_id, now)
        if run.step is not None and hint.step <= run.step:
            return HintOutcome.LATE, []
        nearer = sum(step < hint.step for step in run.hints)
        if nearer >= self._max_steps:
            return HintOutcome.FAR, []
        replaced = run.hints.get(hint.step)
        if self.size() - (replaced.size if replaced else 0) + hint.size > self._max_bytes:
            return HintOutcome.FULL, []
        self.runs[run_id] = run
        run.touched_at, run.hints[hint.step] = now, hint
        surplus = sorted(run.hints)[self._max_steps :]
        for step in surplus:
            del run.hints[step]
        return HintOutcome.KEPT, surplus

    def begin(self, run_id: str, step: int, version: int, now: float) -> list[int]:
        """Record that a batch of this step begins; return the steps whose hints are now useless."""
        run = self.runs.setdefault(run_id, HintedRun(run_id, now))
        run.step, run.version, run.touched_at = step, version, now
        passed = [each for each in run.hints if each <= step]
        for each in passed:
            del run.hints[each]
        return passed

    def is_hinted(self, run_id: str, step: int) -> bool:
        """Return True if there is a hint for the step."""
        run = self.runs.get(run_id)
        return run is not None and step in run.hints

    def idle(self, before: float) -> list[str]:
        """Return the runs without a batch or a hint since `before`, and the surplus over `max_runs`."""
        surplus = max(0, len(self.runs) - self._max_runs)
        oldest = sorted(self.runs.values(), key=lambda run: run.touched_at) if surplus else self.runs.values()
        return [
            run.run_id for number, run in enumerate(oldest) if number < surplus or run.touched_at < before
        ]

    def forget(self, run_id: str) -> None:
        """Forget a run."""
        self.runs.pop(run_id, None)

    def size(self) -> int:
        """Return the bytes of all hints."""
        return sum(hint.size for run in self.runs.values() for hint in run.hints.values())

    def samples(self) -> int:
        """Return the number of samples in all hints."""
        return sum(hint.samples for run in self.runs.values() for hint in run.hints.values())


@dataclass(slots=True, eq=False)
class HintedRun:
    """Run with its hints, the step that began last (None before the first), and the policy version of that step."""

    run_id: str
    touched_at: float
    step: int | None = None
    version: int = 0
    hints: dict[int, Hint] = field(default_factory=dict)

    def position(self) -> int:
        """Return the current step of the run.

        Before the first step it is the step before the nearest hinted one, and at least 0.
        """
        if self.step is not None:
            return self.step
        return max(0, min(self.hints, default=0) - 1)

    def phase(self, unfinished: int, version: int, *, applying: bool) -> bubble_pb2.RunPhase:
        """Return the phase of the run when `version` is published.

        Once the weights after its last step are published, the next step may begin any time; that counts as
        rollout.
        """
        if applying:
            return bubble_pb2.RUN_PHASE_APPLYING
        if unfinished or self.step is None or version != self.version:
            return bubble_pb2.RUN_PHASE_ROLLOUT
        return bubble_pb2.RUN_PHASE_UPDATE


@dataclass(slots=True, eq=False)
class Hint:
    """Hint in the form that the coordinator gets.

    `expected` and `limits` are the expected and the longest response of each group according to the trainer, 0
    where it names none. `size` is in bytes.
    """

    message: bubble_pb2.PutHintRequest
    expected: list[int]
    limits: list[int]
    samples: int
    size: int

    @property
    def hint_id(self) -> str:
        """Id derived from the content, so that every gateway gives the same hint the same id."""
        return self.message.hint_id

    @property
    def step(self) -> int:
        return self.message.step

    def predict(self, length_of: Callable[[str, str, int, int | None], float]) -> None:
        """Set the expected lengths from (run id, prompt id, trainer's guess, limit) -> tokens."""
        groups = zip(self.message.groups, self.expected, self.limits, strict=True)
        for group, expected, limit in groups:
            run_id, prompt_id = self.message.run_id, group.prompt_id
            group.expected_tokens = length_of(run_id, prompt_id, expected, limit or None)


def make_hint(request: rollout_pb2.HintNextBatchRequest) -> Hint:
    """Return the hint of a valid request, with the seeds that the samples of the batch will have.

    Samples with a JSON schema are left out: a schema is compiled only for samples that a trainer waits for.
    """
    exactness = exactness_of(request.exactness)
    coupled = has_coupled_history(exactness)
    digest = hashlib.sha256(request.SerializeToString(deterministic=True)).hexdigest()
    message = bubble_pb2.PutHintRequest(
        run_id=request.run_id, hint_id=f"{request.step}-{digest[:16]}", step=request.step, exactness=exactness
    )
    expected, limits, samples = [], [], 0
    for group in request.groups:
        sampling = group.sampling if group.HasField("sampling") else request.sampling
        if sampling.json_schema:
            continue
        samples += group.samples
        seeds = (
            sample_seed(request.run_seed, request.step, group.prompt_id, slot, coupled_history=coupled)
            for slot in range(group.samples)
        )
        message.groups.add(
            prompt_id=group.prompt_id,
            prompt_token_ids=group.prompt_token_ids,
            sampling=sampling,
            seeds=seeds,
            # A placeholder, so that the size of the message counts the field.
            expected_tokens=1.0,
        )
        expected.append(group.expected_tokens)
        limits.append(sampling.max_tokens if sampling.HasField("max_tokens") else 0)
    return Hint(message, expected, limits, samples, message.ByteSize())


def hinted_batch(request: rollout_pb2.HintNextBatchRequest) -> rollout_pb2.SubmitRolloutsRequest:
    """Return the batch that a hint announces, so that it can be checked like one."""
    return rollout_pb2.SubmitRolloutsRequest(
        run_id=request.run_id,
        batch_id="hint",
        step=request.step,
        policy_version=request.policy_version,
        groups=request.groups,
        sampling=request.sampling,
        exactness=request.exactness,
        run_seed=request.run_seed,
    )


class HintStore:
    """Storage with one hash for each run, which expires `seconds` after the last write.

    Methods raise the errors of Redis, and may be repeated.
    """

    def __init__(self, redis: Redis, namespace: str, seconds: float) -> None:
        self._redis: Any = redis
        self._keys = GatewayKeys(namespace)
        self._seconds = max(1, int(seconds))

    async def write(
        self,
        run_id: str,
        *,
        hint: rollout_pb2.HintNextBatchRequest | None = None,
        begun: tuple[int, int] | None = None,
        dropped: Iterable[int] = (),
    ) -> None:
        """Record a hint of a run, in place of an earlier one for its step; remove the hints of `dropped` steps.

        `begun` is the step of the run that began last, with its version.
        """
        key = self._keys.hints(run_id)
        pipe = self._redis.pipeline(transaction=False)
        # List first: a stored run that is not listed would never be found.
        pipe.sadd(self._keys.hinted, run_id)
        if hint is not None:
            pipe.hset(key, str(hint.step), hint.SerializeToString())
        if begun is not None:
            pipe.hset(key, _BEGUN_FIELD, f"{begun[0]}:{begun[1]}")
        if steps := [str(step) for step in dropped]:
            pipe.hdel(key, *steps)
        pipe.expire(key, self._seconds)
        await pipe.execute()

    async def forget(self, run_id: str) -> None:
        """Remove a run."""
        pipe = self._redis.pipeline(transaction=False)
        pipe.delete(self._keys.hints(run_id))
        pipe.srem(self._keys.hinted, run_id)
        await pipe.execute()

    async def load(self) -> list[StoredRun]:
        """Return all runs, and remove expired ones from the list."""
        found = []
        for name in sorted(await self._redis.smembers(self._keys.hinted)):
            run_id = name.decode()
            stored = await self._redis.hgetall(self._keys.hints(run_id))
            if stored:
                found.append(_stored_run(run_id, stored))
            else:
                await self._redis.srem(self._keys.hinted, run_id)
        return found


@dataclass(slots=True)
class StoredRun:
    """Stored hints of one run, with the step that began last and its policy version."""

    run_id: str
    begun: tuple[int, int] | None = None
    hints: list[rollout_pb2.HintNextBatchRequest] = field(default_factory=list)


def _stored_run(run_id: str, stored: dict[bytes, bytes]) -> StoredRun:
    run = StoredRun(run_id)
    for name, value in stored.items():
        if name.decode() == _BEGUN_FIELD:
            step, version = value.decode().split(":")
            run.begun = int(step), int(version)
        else:
            run.hints.append(rollout_pb2.HintNextBatchRequest.FromString(value))
    return run
