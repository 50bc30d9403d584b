"""Takes hints in, keeps them while they are of use, and stores them for the next gateway."""

from __future__ import annotations

import asyncio
import time

import structlog

from paceline.v1 import rollout_pb2
from services.gateway.batch import Batch
from services.gateway.config import GatewayConfig
from services.gateway.dispatcher import Dispatcher
from services.gateway.hint_store import HintStore
from services.gateway.hints import HintBook, Outcome, make_hint
from services.gateway.metrics import GatewayMetrics
from services.platform.seeds import sample_seed
from services.platform.store import OUTAGES

log = structlog.get_logger(__name__)

# Pause after what should be stored could not be, and between looks for idle runs.
_PAUSE = 1.0
# What a message to the coordinator has beside its hint.
_OVERHEAD_BYTES = 4096


class Hinting:
    """The hints of all runs, for one term of leadership. Begin with `recover`, then `run`."""

    def __init__(
        self, config: GatewayConfig, store: HintStore, dispatcher: Dispatcher, metrics: GatewayMetrics
    ) -> None:
        self.book = HintBook(config.max_hint_steps, config.max_hint_bytes)
        self._config = config
        self._store = store
        self._dispatcher = dispatcher
        self._metrics = metrics
        # Run id -> steps whose hints are to be removed from the store, with the step that began last.
        self._unsaved: dict[str, set[int]] = {}
        self._forgotten: set[str] = set()
        self._wake = asyncio.Event()
        # Held while something is written, so that a hint and the removal of its predecessor keep their order.
        self._writing = asyncio.Lock()

    async def recover(self) -> None:
        """Takes up the hints that former terms were given. Raises what Redis raises."""
        now = time.time()
        for stored in await self._store.load():
            if stored.begun is not None:
                self.book.begin(stored.run_id, *stored.begun, now)
            for request in stored.hints:
                self.book.put(make_hint(request, _seed), now)
        self._changed()

    async def hint(self, request: rollout_pb2.HintNextBatchRequest) -> int:
        """Takes in a valid hint; returns how many samples may be pre-generated for it, 0 if it is not kept."""
        outcome, samples = self._take(request)
        self._metrics.hints.labels(outcome.value).inc()
        log.info("hint", run=request.run_id, step=request.step, outcome=outcome.value, samples=samples)
        if outcome is not Outcome.KEPT:
            return 0
        self._changed()
        async with self._writing:
            self._unsaved.get(request.run_id, set()).discard(request.step)
            try:
                await self._store.put(request)
            except OUTAGES as error:
                # It is used all the same; only a restart would forget it.
                log.warning("hint_not_stored", run=request.run_id, step=request.step, error=str(error))
        return samples

    def begin(self, batch: Batch) -> None:
        """A batch is about to be worked on: hints for its step and those before are of no use any more."""
        run_id = batch.key[0]
        passed = self.book.begin(run_id, batch.step, batch.policy_version, time.time())
        self._forgotten.discard(run_id)
        self._drop_later(run_id, passed)
        self._changed()

    def resume(self, batch: Batch) -> None:
        """As `begin`, for a batch that is taken up again: a later step may have begun since."""
        run = self.book.runs.get(batch.key[0])
        if run is None or run.step is None or run.step < batch.step:
            self.begin(batch)

    async def run(self) -> None:
        """Stores what has changed, and forgets idle runs, until cancelled."""
        while True:
            try:
                async with asyncio.timeout(_PAUSE):
                    await self._wake.wait()
            except TimeoutError:
                self._forget_idle()
            self._wake.clear()
            try:
                await self._store_changes()
            except OUTAGES as error:
                log.warning("hints_not_stored", error=str(error))
                await asyncio.sleep(_PAUSE)

    def _take(self, request: rollout_pb2.HintNextBatchRequest) -> tuple[Outcome, int]:
        samples = sum(group.samples for group in request.groups)
        # Checked before there is a seed for each of them.
        if samples > self._config.max_queued_samples:
            return Outcome.FULL, samples
        hint = make_hint(request, _seed)
        if hint.size > self._config.max_message_bytes - _OVERHEAD_BYTES:
            return Outcome.FULL, samples
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
                    await self._store.begin(run_id, begun, steps)
                except OUTAGES:
                    self._unsaved.setdefault(run_id, set()).update(steps)
                    raise
        for run_id in list(self._forgotten):
            await self._store.forget(run_id)
            self._forgotten.discard(run_id)

    def _forget_idle(self) -> None:
        self._metrics.runs.forget(time.time() - self._config.run_idle_seconds)
        busy = {running.batch.key[0] for running in self._dispatcher.batches.values()}
        for run_id in self.book.idle(time.time() - self._config.run_idle_seconds):
            if run_id not in busy:
                log.info("run_forgotten", run=run_id)
                self.book.forget(run_id)
                self._unsaved.pop(run_id, None)
                self._forgotten.add(run_id)
                self._changed()

    def _changed(self) -> None:
        self._metrics.hinted.set(self.book.samples())
        self._dispatcher.moved.set()


def _seed(run_seed: int, step: int, prompt_id: str, slot: int, coupled_history: bool) -> int:
    return sample_seed(run_seed, step, prompt_id, slot, coupled_history=coupled_history)
