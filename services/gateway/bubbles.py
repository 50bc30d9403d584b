"""Keeps the bubble coordinator informed, and asks it what is drafted of a coming step.

The coordinator holds nothing of its own, so it is told the whole state of every run: whenever something changes
that matters to it, and once a second. Nothing ever waits for it except a submission, for the drafts of its
step, and that only for a moment.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import structlog

from paceline.internal.v1 import bubble_pb2
from services.gateway.config import GatewayConfig
from services.gateway.coordinator import Coordinator, Refused
from services.gateway.dispatcher import Dispatcher
from services.gateway.hints import Coverage, Covered, Hint, HintBook, HintedRun
from services.gateway.update import UpdateBook
from services.platform.registry import Registry

log = structlog.get_logger(__name__)

# Seconds after which a run is told again although nothing has changed.
_AGAIN = 1.0
# Changes come in flurries: those within so many seconds of each other are told together.
_DEBOUNCE = 0.005


@dataclass(slots=True)
class _Count:
    unfinished: int = 0
    waiting: int = 0


class BubbleLink:
    """The link to the coordinator, for one term of leadership. `coordinator.run` and `run` are to be run."""

    def __init__(
        self,
        config: GatewayConfig,
        registry: Registry,
        hints: HintBook,
        dispatcher: Dispatcher,
        book: UpdateBook,
    ) -> None:
        self.coordinator = Coordinator(config, registry, dispatcher.moved.set)
        self._coverage_timeout = config.coverage_timeout_seconds
        self._hints = hints
        self._dispatcher = dispatcher
        self._book = book
        self._loop = asyncio.get_running_loop()
        # Run id -> what was last told of it and when (loop time), over connection number `_told_on`.
        self._told: dict[str, tuple[bubble_pb2.SetRunRequest, float]] = {}
        self._told_on = 0
        self._refused: set[str] = set()

    async def coverage(self, run_id: str, step: int) -> Coverage | None:
        """What there is of the samples of a step; None when it was not hinted. Takes a moment at most."""
        if not self._hints.is_hinted(run_id, step):
            return None
        request = bubble_pb2.GetCoverageRequest(run_id=run_id, step=step)
        try:
            response = await self.coordinator.call("GetCoverage", request, self._coverage_timeout)
        except Refused as refused:
            log.error("coverage_refused", run=run_id, step=step, reason=str(refused))
            response = None
        slots = response.slots if response is not None else ()
        return {(each.prompt_id, each.slot): Covered(each.tokens, each.finished) for each in slots}

    async def run(self) -> None:
        """Tells the coordinator until cancelled."""
        moved = self._dispatcher.moved
        while True:
            moved.clear()
            await self._tell_all()
            await asyncio.sleep(_DEBOUNCE)
            try:
                async with asyncio.timeout(_AGAIN):
                    await moved.wait()
            except TimeoutError:
                continue

    async def _tell_all(self) -> None:
        if self._told_on != self.coordinator.connections:
            self._told_on = self.coordinator.connections
            self._told.clear()
            self._refused.clear()
        for run_id in self._told.keys() - self._hints.runs.keys():
            await self._tell(bubble_pb2.SetRunRequest(run_id=run_id, closed=True))
            self._told.pop(run_id, None)
        for run in list(self._hints.runs.values()):
            # Counted anew for each: telling the one before took time.
            message = self._message(run)
            known, at = self._told.get(run.run_id, (None, 0.0))
            if known is None or _matters(known) != _matters(message) or self._loop.time() - at >= _AGAIN:
                await self._tell(message)

    async def _tell(self, message: bubble_pb2.SetRunRequest) -> None:
        connection = self.coordinator.connections
        try:
            response = await self.coordinator.call("SetRun", message)
        except Refused as refused:
            log.error("standing_refused", run=message.run_id, reason=str(refused))
            return
        if response is None or connection != self.coordinator.connections:
            return
        self._told[message.run_id] = (message, self._loop.time())
        run = self._hints.runs.get(message.run_id)
        for hint in list(run.hints.values()) if run is not None else ():
            if hint.hint_id in response.missing_hint_ids and hint.hint_id not in self._refused:
                await self._put(hint)

    async def _put(self, hint: Hint) -> None:
        hint.predict(self._dispatcher.lengths.predict)
        try:
            response = await self.coordinator.call("PutHint", hint.message)
        except Refused as refused:
            log.error("hint_refused", hint=hint.hint_id, reason=str(refused))
            self._refused.add(hint.hint_id)
            return
        if response is not None:
            log.debug("hint_put", hint=hint.hint_id, samples=response.samples)

    def _message(self, run: HintedRun) -> bubble_pb2.SetRunRequest:
        count, version = self._count(run.run_id), self._book.version or 0
        return bubble_pb2.SetRunRequest(
            run_id=run.run_id,
            phase=run.phase(count.unfinished, version, applying=self._book.is_applying()),
            policy_version=version,
            step=run.position(),
            unfinished=count.unfinished,
            waiting=count.waiting,
            hint_ids=[hint.hint_id for _, hint in sorted(run.hints.items())],
        )

    def _count(self, run_id: str) -> _Count:
        """Samples of a run. Those of Generate calls belong to no run, and wait like any other: they count as
        waiting for each."""
        count = _Count()
        for running in self._dispatcher.batches.values():
            unfinished = len(running.batch.samples) - running.batch.ended
            if running.private or running.batch.key[0] == run_id:
                count.waiting += unfinished - len(running.places)
            if not running.private and running.batch.key[0] == run_id:
                count.unfinished += unfinished
        return count


def _matters(message: bubble_pb2.SetRunRequest) -> tuple[object, ...]:
    """What decisions depend on: not how many samples there are, but whether there are any."""
    return (
        message.phase,
        message.policy_version,
        message.step,
        message.unfinished == 0,
        message.waiting == 0,
        list(message.hint_ids),
    )
