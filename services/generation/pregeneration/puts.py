"""Rollouts on their way to the draft store, sent in the background."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Protocol

from services.drafts.rollout import Rollout

MOST_TOKENS = 4_000_000
"""Tokens that wait at most; 32 MB."""
_BATCH_TOKENS = 100_000
# How often a store that is away is looked for.
_AWAY_SECONDS = 0.5

_Name = tuple[str, str, int, int]


class RolloutStore(Protocol):
    """What is used of `services.drafts.client.DraftStores`."""

    @property
    def available(self) -> bool: ...
    async def put(self, rollouts: Sequence[Rollout]) -> int: ...


class PutMetrics(Protocol):
    """Where puts are counted."""

    def put(self, rollouts: int, stored: int, tokens: int) -> None: ...


class PutQueue:
    """The latest rollout of each sample, until it is sent: one call at a time, so that order is kept.

    While the store is away rollouts wait, the oldest beyond `most_tokens` are dropped.
    """

    def __init__(self, store: RolloutStore, metrics: PutMetrics, most_tokens: int = MOST_TOKENS) -> None:
        self._store = store
        self._metrics = metrics
        self._most_tokens = most_tokens
        self._waiting: OrderedDict[_Name, Rollout] = OrderedDict()
        self._tokens = 0
        self._sending = False
        self._some = asyncio.Event()
        self._none = asyncio.Event()
        self._none.set()

    @property
    def tokens(self) -> int:
        """Tokens that wait to be sent."""
        return self._tokens

    def add(self, rollouts: Iterable[Rollout]) -> None:
        """Send these soon. A rollout of a sample takes the place of an earlier one that was not sent yet."""
        for rollout in rollouts:
            self._remove(_name(rollout))
            self._waiting[_name(rollout)] = rollout
            self._tokens += len(rollout.tokens)
        while self._tokens > self._most_tokens:
            lost = self._remove(next(iter(self._waiting)))
            self._metrics.put(1, 0, lost)
        self._tell()

    async def run(self) -> None:
        """Send until cancelled."""
        while True:
            await self._some.wait()
            if self._store.available:
                await self._send()
            else:
                await asyncio.sleep(_AWAY_SECONDS)

    async def sent(self, seconds: float) -> None:
        """Return when nothing waits any more, or after so many seconds, or at once while the store is away."""
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
            self._tell()
        else:
            # Behind what came since; a newer rollout of a sample stays.
            self.add([rollout for rollout in batch if _name(rollout) not in self._waiting])

    def _take(self) -> list[Rollout]:
        batch: list[Rollout] = []
        tokens = 0
        while self._waiting and (not batch or tokens < _BATCH_TOKENS):
            name, rollout = next(iter(self._waiting.items()))
            tokens += self._remove(name)
            batch.append(rollout)
        return batch

    def _remove(self, name: _Name) -> int:
        """Forget one that waits; its tokens, 0 when there was none."""
        rollout = self._waiting.pop(name, None)
        tokens = 0 if rollout is None else len(rollout.tokens)
        self._tokens -= tokens
        return tokens

    def _tell(self) -> None:
        if self._waiting:
            self._some.set()
            self._none.clear()
        else:
            self._some.clear()
            if not self._sending:
                self._none.set()


def _name(rollout: Rollout) -> _Name:
    return rollout.run_id, rollout.prompt_id, rollout.slot, rollout.seed
