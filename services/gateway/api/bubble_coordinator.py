"""Report every run to the bubble coordinator, and query the drafts that exist of a step.

The coordinator is found in the registry. It stores nothing itself, so it gets the whole state of every run after
each change that matters to it, and once a second. Only a submission waits for it, for the drafts of its step, and
for at most `coverage_timeout` seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import structlog

from paceline.internal.v1 import bubble_pb2 as pb
from paceline.internal.v1 import bubble_pb2_grpc
from services.gateway.api.hints import Hint, HintBook, HintedRun
from services.gateway.config import GatewayConfig
from services.gateway.scheduler.active_batches import ActiveBatches
from services.gateway.scheduler.estimator import Coverage, DraftCoverage, LengthPredictor
from services.gateway.state.update_book import UpdateBook
from services.platform.grpc.channel import open_channel
from services.platform.redis.registry import InstanceRecord, Registry
from services.platform.tasks import ExponentialBackoff, is_cancelled

log = structlog.get_logger(__name__)

SERVICE = "bubbles"
# Seconds between two reads of the registry, and the deadline of a call.
_LOOK, _CALL = 0.5, 1.0
# Seconds until the next attempt to connect, after one failure and after many in a row.
_FIRST_DELAY, _LONGEST_DELAY = 0.1, 2.0
# Codes with which the coordinator says that the request is at fault.
_REFUSALS = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)
# Seconds after which a run is reported again although nothing has changed.
_REPEAT = 1.0
# Changes come in bursts: changes within this many seconds are reported together.
_DEBOUNCE = 0.005
# Seconds to add for each batch, since a report walks over all batches, and the most seconds to add.
_FOR_A_BATCH, _MOST_FOR_BATCHES = 0.0001, 0.1


class CoordinatorRefusal(Exception):
    """Raised when the coordinator rejects a request permanently."""


class CoordinatorClient:
    """Client of the coordinator that registered last.

    `connections` counts the connections made; `found` is called with each.
    """

    def __init__(self, config: GatewayConfig, registry: Registry, found: Callable[[], None]) -> None:
        self.connections = 0
        self._config = config
        self._registry = registry
        self._found = found
        self._record: InstanceRecord | None = None
        self._channel: grpc.aio.Channel | None = None
        self._stub: Any = None
        self._backoff = ExponentialBackoff(_FIRST_DELAY, _LONGEST_DELAY)
        self._retry_at = 0.0
        self._loop = asyncio.get_running_loop()

    @property
    def connected(self) -> bool:
        """Return True unless no coordinator is known or the last call failed."""
        return self._stub is not None

    async def run(self) -> None:
        """Keep a connection to the coordinator until cancelled."""
        try:
            await self._registry.watch(SERVICE, _LOOK, self._look)
        finally:
            await self._disconnect()

    async def call(self, method: str, request: Any, seconds: float = _CALL) -> Any | None:
        """Return the answer; None if there is no coordinator or it does not answer in time.

        CoordinatorRefusal if it rejects the request.
        """
        stub = self._stub
        if stub is None:
            return None
        try:
            response = await getattr(stub, method)(request, timeout=seconds)
        except grpc.aio.AioRpcError as error:
            if error.code() in _REFUSALS:
                raise CoordinatorRefusal(f"{error.code().name}: {error.details()}") from error
            hurried = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and seconds < _CALL
            if stub is self._stub and not hurried:
                await self._failed(f"{error.code().name}: {error.details()}")
            return None
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            # The channel was closed during the call; the caller was not cancelled.
            return None
        self._backoff.succeeded()
        return response

    async def _look(self, records: dict[str, InstanceRecord] | None) -> None:
        known, found = self._record, (records or {}).values()
        # Keep trying one that is no longer registered: perhaps only the registry is down.
        youngest = max(found, key=lambda each: (each.registered_at, each.instance_id), default=known)
        if youngest is None:
            return
        if known is None or (youngest.instance_id, youngest.epoch) != (known.instance_id, known.epoch):
            await self._disconnect()
            self._record, self._retry_at = youngest, 0.0
            self._backoff.succeeded()
        if self._stub is None and self._loop.time() >= self._retry_at:
            self._connect(youngest)

    def _connect(self, record: InstanceRecord) -> None:
        try:
            self._channel = open_channel(record.address, self._config)
        except ValueError as error:
            # The token must not be sent there: a mistake in the configuration, so a retry does not help soon.
            self._retry_at = self._loop.time() + 60.0
            log.error("coordinator_not_dialled", address=record.address, error=str(error))
            return
        self._stub = bubble_pb2_grpc.BubbleServiceStub(self._channel)
        self.connections += 1
        self._found()

    async def _failed(self, reason: str) -> None:
        if self._backoff.failures == 0:
            assert self._record is not None, "a call was made"
            log.warning("coordinator_unreachable", address=self._record.address, reason=reason)
        self._retry_at = self._loop.time() + self._backoff.failed()
        # A channel that failed waits longer and longer before it reconnects; a new one connects at once.
        await self._disconnect()

    async def _disconnect(self) -> None:
        channel, self._channel, self._stub = self._channel, None, None
        if channel is not None:
            await channel.close()


@dataclass(eq=False)
class BubbleLink:
    """Reports to the coordinator for one term of leadership. `coverage_timeout` is in seconds."""

    coordinator: CoordinatorClient
    hints: HintBook
    batches: ActiveBatches
    lengths: LengthPredictor
    book: UpdateBook
    coverage_timeout: float
    _loop: asyncio.AbstractEventLoop = field(init=False, default_factory=asyncio.get_running_loop)
    # Run id -> its last report and the loop time of it, on connection number `_reported_on`.
    _reported: dict[str, tuple[pb.SetRunRequest, float]] = field(init=False, default_factory=dict)
    _reported_on: int = field(init=False, default=0)
    _refused: set[str] = field(init=False, default_factory=set)

    async def coverage(self, run_id: str, step: int) -> Coverage | None:
        """Return the drafts of the samples of a step; None if it was not hinted."""
        if not self.hints.is_hinted(run_id, step):
            return None
        request = pb.GetCoverageRequest(run_id=run_id, step=step)
        try:
            response = await self.coordinator.call("GetCoverage", request, self.coverage_timeout)
        except CoordinatorRefusal as refused:
            log.error("coverage_refused", run=run_id, step=step, reason=str(refused))
            response = None
        slots = response.slots if response is not None else ()
        return {(each.prompt_id, each.slot): DraftCoverage(each.tokens, each.finished) for each in slots}

    async def run(self) -> None:
        """Report to the coordinator until cancelled."""
        progress = self.batches.progress
        while True:
            progress.clear()
            await self._report_all()
            await asyncio.sleep(_DEBOUNCE + min(_FOR_A_BATCH * len(self.batches.by_key), _MOST_FOR_BATCHES))
            try:
                async with asyncio.timeout(_REPEAT):
                    await progress.wait()
            except TimeoutError:
                continue

    async def _report_all(self) -> None:
        if not self.coordinator.connected:
            return
        if self._reported_on != self.coordinator.connections:
            self._reported_on = self.coordinator.connections
            self._reported.clear()
            self._refused.clear()
        for run_id in self._reported.keys() - self.hints.runs.keys():
            await self._report(pb.SetRunRequest(run_id=run_id, closed=True))
            self._reported.pop(run_id, None)
        for run in list(self.hints.runs.values()):
            # Count for each run separately: the report of the previous run took time.
            message = self._message(run)
            known, at = self._reported.get(run.run_id, (None, 0.0))
            if known is None or _matters(known) != _matters(message) or self._loop.time() - at >= _REPEAT:
                await self._report(message)

    async def _report(self, message: pb.SetRunRequest) -> None:
        connection = self.coordinator.connections
        try:
            response = await self.coordinator.call("SetRun", message)
        except CoordinatorRefusal as refused:
            log.error("run_report_refused", run=message.run_id, reason=str(refused))
            return
        if response is None or connection != self.coordinator.connections:
            return
        self._reported[message.run_id] = (message, self._loop.time())
        run = self.hints.runs.get(message.run_id)
        for hint in list(run.hints.values()) if run is not None else ():
            if hint.hint_id in response.missing_hint_ids and hint.hint_id not in self._refused:
                await self._put(hint)

    async def _put(self, hint: Hint) -> None:
        hint.predict(self.lengths.predict)
        try:
            response = await self.coordinator.call("PutHint", hint.message)
        except CoordinatorRefusal as refused:
            log.error("hint_refused", hint=hint.hint_id, reason=str(refused))
            self._refused.add(hint.hint_id)
            return
        if response is not None:
            log.debug("hint_put", hint=hint.hint_id, samples=response.samples)

    def _message(self, run: HintedRun) -> pb.SetRunRequest:
        (unfinished, waiting), version = self._count(run.run_id), self.book.version or 0
        return pb.SetRunRequest(
            run_id=run.run_id,
            phase=run.phase(unfinished, version, applying=self.book.is_applying()),
            policy_version=version,
            step=run.position(),
            unfinished=unfinished,
            waiting=waiting,
            hint_ids=[hint.hint_id for _, hint in sorted(run.hints.items())],
        )

    def _count(self, run_id: str) -> tuple[int, int]:
        """Return the numbers of unfinished and of waiting samples of a run.

        Samples of Generate calls may belong to any run or to none, and count as waiting for every run.
        """
        unfinished = waiting = 0
        for running in self.batches.by_key.values():
            own = running.batch.key[0] == run_id
            if running.private or own:
                waiting += running.batch.unfinished - len(running.places)
            if own:
                unfinished += running.batch.unfinished
        return unfinished, waiting


def _matters(message: pb.SetRunRequest) -> tuple[object, ...]:
    """Return the fields that decisions depend on. The number of samples matters only in being 0 or not."""
    return (
        message.phase,
        message.policy_version,
        message.step,
        message.unfinished == 0,
        message.waiting == 0,
        list(message.hint_ids),
    )
