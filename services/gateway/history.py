"""Hands finished samples to the draft store, for later epochs to reuse.

In the background and without acknowledgement: what the store does not get in time costs speed in a later
epoch, and nothing else. Neither the event loop nor the delivery of a sample ever waits for it.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import structlog

from paceline.v1 import sample_pb2
from services.drafts.rollout import Kind, Rollout
from services.gateway.batch import Batch, Ending
from services.gateway.metrics import GatewayMetrics

log = structlog.get_logger(__name__)

MOST_WAITING = 32 << 20
"""Most bytes that wait for the store: minutes of a fleet's output. Above it the oldest are dropped."""
MOST_PUT = 4 << 20
"""Bytes of one put: little enough to be stored within its deadline, enough to carry its round trip."""
PAUSE = 0.25
"""Seconds between looks for a store, while there is none."""

_WHOLE = (sample_pb2.SAMPLE_STATUS_COMPLETED, sample_pb2.SAMPLE_STATUS_TRUNCATED)


class Store(Protocol):
    """What is needed of services.drafts.client.DraftStores."""

    @property
    def available(self) -> bool:
        """Whether a put would be tried now."""

    async def put(self, rollouts: Sequence[Rollout]) -> int:
        """Stores rollouts; returns how many were taken. Raises nothing for outages."""


class History:
    """A bounded queue to the store. `offer` only notes; `run` carries."""

    def __init__(self, store: Store, metrics: GatewayMetrics, most_waiting: int = MOST_WAITING) -> None:
        self._store = store
        self._metrics = metrics
        self._most = most_waiting
        self._waiting: deque[Rollout] = deque()
        self._bytes = 0
        self._wake = asyncio.Event()

    def offer(self, batch: Batch, ending: Ending) -> None:
        """Notes a sample that has just ended, tokens still in place, if it is one to be kept."""
        rollout = rollout_of(batch, ending)
        if rollout is not None:
            self._waiting.append(rollout)
            self._bytes += rollout.nbytes
            self._drop_surplus()
            self._wake.set()

    async def run(self) -> None:
        """Carries until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                if self._store.available:
                    await self._put(self._take())
                else:
                    await asyncio.sleep(PAUSE)

    async def _put(self, rollouts: list[Rollout]) -> None:
        stored = await self._store.put(rollouts)
        if stored == 0 and not self._store.available:
            # The store went away under the put. It may be repeated: a rollout is stored under its name.
            self._waiting.extendleft(reversed(rollouts))
            self._bytes += sum(rollout.nbytes for rollout in rollouts)
            self._drop_surplus()
            return
        self._metrics.history.labels("stored").inc(stored)
        self._metrics.history.labels("not_stored").inc(len(rollouts) - stored)

    def _take(self) -> list[Rollout]:
        taken = [self._waiting.popleft()]
        size = taken[0].nbytes
        while self._waiting and size + self._waiting[0].nbytes <= MOST_PUT:
            taken.append(self._waiting.popleft())
            size += taken[-1].nbytes
        self._bytes -= size
        return taken

    def _drop_surplus(self) -> None:
        dropped = 0
        while self._bytes > self._most:
            self._bytes -= self._waiting.popleft().nbytes
            dropped += 1
        if dropped:
            self._metrics.history.labels("dropped").inc(dropped)
            log.debug("history_dropped", rollouts=dropped)


def rollout_of(batch: Batch, ending: Ending) -> Rollout | None:
    """The sample as the store keeps it; None when it ended early, or has a log-probability that is no number.

    Log-probabilities are those under the batch's policy version: of what a LENIENT sample took over from
    its cached rollout, the ones that it was verified with, not the ones that the sample is delivered with.
    """
    state = batch.samples[ending.index]
    if ending.status not in _WHOLE or not state.tokens:
        return None
    # Copies: the sample's own arrays are let go once they are in the journal.
    logprobs = np.array(state.logprobs, dtype=np.float32)
    logprobs[: len(state.verified)] = state.verified
    if np.isnan(logprobs).any():
        return None
    return Rollout(
        run_id=batch.key[0],
        prompt_id=batch.groups[state.group].prompt_id,
        slot=state.slot,
        version=batch.policy_version,
        kind=Kind.HISTORY,
        step=batch.step,
        seed=state.seed,
        tokens=np.array(state.tokens, dtype=np.uint32),
        logprobs=logprobs,
        finished=True,
    )
