"""Write finished samples to the draft store, so that later epochs reuse them.

The writer works in the background and without acknowledgement: a sample that the store does not get in time costs
speed in a later epoch, and nothing else. Neither the event loop nor the delivery of a sample ever waits for it.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import numpy as np

from services.contracts.rollout import RolloutKind, StoredRollout
from services.drafts.client import DraftStores
from services.gateway.feeds.outbox import Outbox
from services.gateway.metrics import GatewayMetrics
from services.gateway.state.rollout_batch import RolloutBatch
from services.gateway.state.sample import SampleEnding

MOST_WAITING = 32 << 20
"""Most bytes that wait for the store: minutes of a fleet's output. Above it the oldest are dropped."""
MOST_PUT = 4 << 20
"""Bytes of one put: few enough to be stored within its deadline, enough to be worth a round trip."""
PAUSE = 0.25
"""Seconds between two checks for a store while there is none."""
LINGER, SOON = 1.0, 0.05
"""Seconds for which samples wait for others to share their put, and seconds left of that once a batch has ended:
its
trainer gets its samples first."""


class HistoryWriter:
    """Writer of finished samples to the draft store. `offer` only queues; `run` writes."""

    def __init__(self, store: DraftStores, metrics: GatewayMetrics, most_waiting: int = MOST_WAITING) -> None:
        self._store = store
        self._metrics = metrics
        dropped = metrics.history.labels("dropped").inc
        self._waiting: Outbox[StoredRollout] = Outbox(most_waiting, lambda rollout: rollout.nbytes, dropped)
        # Set when there is no reason to wait for more samples.
        self._due = asyncio.Event()

    def offer(self, batch: RolloutBatch, ending: SampleEnding) -> None:
        """Queue a sample that has just ended, with its tokens in place, if it is worth storing."""
        rollout = rollout_of(batch, ending)
        if rollout is not None:
            self._waiting.put(rollout)
        if batch.is_done() or self._waiting.nbytes >= MOST_PUT:
            self._due.set()

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            await self._waiting.wait()
            if self._waiting.nbytes < MOST_PUT:
                await self._gather()
            if self._store.available:
                await self._put(self._waiting.take(MOST_PUT))
            else:
                await asyncio.sleep(PAUSE)

    async def _gather(self) -> None:
        """Wait for more samples: a put costs the gateway and the store as much as many samples in it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER):
                await self._due.wait()
                await asyncio.sleep(SOON)
        self._due.clear()

    async def _put(self, rollouts: list[StoredRollout]) -> None:
        stored = await self._store.put(rollouts)
        if stored == 0 and not self._store.available:
            # The store was lost during the put. Repeating it is safe: a rollout is stored under its name.
            self._waiting.put_back(rollouts)
            return
        self._metrics.history.labels("stored").inc(stored)
        self._metrics.history.labels("not_stored").inc(len(rollouts) - stored)


def rollout_of(batch: RolloutBatch, ending: SampleEnding) -> StoredRollout | None:
    """Return the rollout of a sample; None if it ended early, or has a log-probability that is not a number.

    Also None if it has no name, or has first tokens from its caller whose log-probabilities are not known.

    Log-probabilities are under the policy version that sampled each token. For tokens that a LENIENT sample took
    from its cached rollout, they are the ones that the tokens were verified with, not the delivered ones. The
    version of the rollout is the version of its last token.
    """
    state = batch.samples[ending.index]
    if not ending.is_whole or not state.tokens or not batch.cached_run:
        return None
    group = batch.groups[state.group]
    if len(group.prefix) != len(group.prefix_logprobs):
        return None
    # Copy: the arrays of the sample are freed once they are in the journal.
    logprobs = np.array(state.columns.logprobs, dtype=np.float32)
    logprobs[: len(state.verified)] = state.verified
    logprobs = np.concatenate([np.asarray(group.prefix_logprobs, np.float32), logprobs])
    if np.isnan(logprobs).any():
        return None
    return StoredRollout(
        run_id=batch.key[0],
        prompt_id=group.prompt_id,
        slot=state.slot,
        version=state.columns.versions[-1][1],
        kind=RolloutKind.HISTORY,
        step=batch.step,
        seed=state.seed,
        tokens=np.concatenate([np.asarray(group.prefix, np.uint32), np.array(state.tokens, np.uint32)]),
        logprobs=logprobs,
        finished=True,
    )
