"""Queue of rollouts that are sent to the draft store in the background."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress

from services.contracts.rollout import StoredRollout
from services.drafts.client import DraftStores
from services.generation.loop.metrics import PregenerationMetrics

MOST_TOKENS = 4_000_000
"""Most tokens that wait; 32 MB."""
_BATCH_TOKENS = 100_000
# Time between two checks for a store that is unavailable.
_AWAY_SECONDS = 0.5

_Name = tuple[str, str, int, int, int]


class UploadQueue:
    """Holds the latest rollout of each sample until it is sent, with one call at a time to keep the order.

    While the store is unavailable rollouts wait; the oldest beyond `most_tokens` are dropped.
    """

    def __init__(
        self, store: DraftStores, metrics: PregenerationMetrics, most_tokens: int = MOST_TOKENS
    ) -> None:
        self._store = store
        self._metrics = metrics
        self._most_tokens = most_tokens
        self._waiting: OrderedDict[_Name, StoredRollout] = OrderedDict()
        self.tokens = 0
        """Number of tokens that wait to be sent."""
        self._sending = False
        self._some = asyncio.Event()
        self._none = asyncio.Event()
        self._none.set()

    def add(self, rollouts: Iterable[StoredRollout]) -> None:
        """Queue rollouts; a rollout replaces an earlier one of its sample that was not sent yet."""
        for rollout in rollouts:
            self._remove(_name(rollout))
            self._waiting[_name(rollout)] = rollout
            self.tokens += len(rollout.tokens)
        while self.tokens > self._most_tokens:
            lost = self._remove(next(iter(self._waiting)))
            self._metrics.put(1, 0, lost)
        self._notify()

    async def run(self) -> None:
        """Send until cancelled."""
        while True:
            await self._some.wait()
            if self._store.available:
                await self._send()
            else:
                await asyncio.sleep(_AWAY_SECONDS)

    async def sent(self, seconds: float) -> None:
        """Return once no rollout waits, after `seconds` at the latest, or at once if the store is unavailable."""
        if self._store.available:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._none.wait()

    async def _send(self) -> None:
        batch = self._take()
        tokens = sum(len(rollout.tokens) for rollout in batch)
        self._sending = True
        try:
            stored = await self._store.put(batch)
        finally:
            self._sending = False
        if stored or self._store.available:
            self._metrics.put(len(batch), stored, tokens)
            self._notify()
        else:
            # Queued again after later arrivals, except for samples with a newer rollout.
            self.add([rollout for rollout in batch if _name(rollout) not in self._waiting])

    def _take(self) -> list[StoredRollout]:
        batch: list[StoredRollout] = []
        tokens = 0
        while self._waiting and (not batch or tokens < _BATCH_TOKENS):
            name, rollout = next(iter(self._waiting.items()))
            tokens += self._remove(name)
            batch.append(rollout)
        return batch

    def _remove(self, name: _Name) -> int:
        """Remove a waiting rollout; return the number of its tokens, 0 if there was none."""
        rollout = self._waiting.pop(name, None)
        tokens = 0 if rollout is None else len(rollout.tokens)
        self.tokens -= tokens
        return tokens

    def _notify(self) -> None:
        if self._waiting:
            self._some.set()
            self._none.clear()
        else:
            self._some.clear()
            if not self._sending:
                self._none.set()


def _name(rollout: StoredRollout) -> _Name:
    return rollout.run_id, rollout.prompt_id, rollout.slot, rollout.seed, rollout.fork
