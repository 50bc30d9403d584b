"""Fetch the rollouts of prompts from the draft store, in the background and once per prompt and step."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import cast

import structlog

from services.contracts.errors import ServiceError
from services.contracts.rollout import StoredRollout
from services.drafts.client import DraftStores
from services.generation.draft_cache.cache import RolloutMetrics, ShardQuery, Shards
from services.generation.draft_cache.origin import Origin, PromptKey

_log = structlog.get_logger(__name__)
# Fetched rollouts are added to the cache between two engine steps, which more prompts at once would delay.
_PROMPTS_PER_CALL = 16
# Most concurrent calls.
_CALLS = 4

_Want = tuple[PromptKey, ShardQuery]


class ShardFetcher:
    """Fetches the rollouts that samples of a prompt can draft from.

    Usage, in the event loop: `want` for every new sample, `close` at the end. No call fails; a prompt that was
    missed is fetched again with its next sample.
    """

    def __init__(
        self,
        stores: DraftStores,
        fetched_for: Callable[[PromptKey], ShardQuery | None],
        deliver: Callable[[Shards], Awaitable[None]],
        metrics: RolloutMetrics,
    ) -> None:
        """Fetch from stores.

        Args:
            stores: replicas of the draft store.
            fetched_for: returns the query that fetched a prompt's rollouts last, if they are still cached.
            deliver: adds the rollouts to the cache; a ServiceError means that they are not needed any more.
            metrics: of fetches.
        """
        self._stores = stores
        self._fetched_for = fetched_for
        self._deliver = deliver
        self._metrics = metrics
        self._wanted: dict[_Want, asyncio.Future[None]] = {}
        # The wanted ones that no call fetches yet, in order.
        self._queue: dict[_Want, None] = {}
        self._calls: set[asyncio.Task[None]] = set()

    def want(self, origin: Origin, *, whole: bool = False) -> asyncio.Future[None] | None:
        """Fetch the rollouts for a sample; `whole` with the history of slots that are generated ahead.

        The future resolves when they are cached, or when they cannot be had. None: there is nothing to wait for,
        because they are cached already, the sample belongs to no run, or no store is available.
        """
        prompt = origin.prompt
        if prompt is None or not self._stores.available:
            return None
        if self._fetched_for(prompt) in (ShardQuery(origin.step), ShardQuery(origin.step, whole)):
            return None
        want = (prompt, ShardQuery(origin.step, whole))
        if want not in self._wanted:
            self._wanted[want] = asyncio.get_running_loop().create_future()
            self._queue[want] = None
            if len(self._calls) < _CALLS:
                # Begins after this turn of the event loop: prompts wanted in the same turn go into one call.
                self._calls.add(asyncio.create_task(self._call()))
        return self._wanted[want]

    async def close(self) -> None:
        """Give up the calls under way; samples that wait for them start without."""
        calls, self._calls = self._calls, set()
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        self._queue.clear()
        self._resolve(list(self._wanted))

    async def _call(self) -> None:
        """Fetch until nothing is wanted any more."""
        while batch := self._take():
            try:
                await self._fetch(batch)
            except ServiceError as error:
                _log.info("rollouts_not_needed", error=error.message)
            except Exception:
                # A defect: these prompts go without drafts, and others are not affected.
                _log.exception("fetch_failed")
            finally:
                self._resolve(batch)
        # In the same turn in which the queue was found empty, so that later wants begin another call.
        self._calls.discard(cast("asyncio.Task[None]", asyncio.current_task()))

    def _take(self) -> list[_Want]:
        """Return the next prompts for one call, all of the same run and query."""
        batch: list[_Want] = []
        for want in self._queue:
            (run_id, _), query = want
            if batch and (run_id, query) != (batch[0][0][0], batch[0][1]):
                continue
            batch.append(want)
            if len(batch) == _PROMPTS_PER_CALL:
                break
        for want in batch:
            del self._queue[want]
        return batch

    async def _fetch(self, batch: Sequence[_Want]) -> None:
        run_id, query = batch[0][0][0], batch[0][1]
        began, prompts = time.monotonic(), [prompt_id for (_, prompt_id), _ in batch]
        fetched = await self._stores.fetch(run_id, prompts, whole=query.whole)
        if fetched.missed:
            self._metrics.fetch_failures.inc()
        found: dict[PromptKey, list[StoredRollout]] = {prompt: [] for prompt, _ in batch}
        for rollout in fetched.rollouts:
            if (rollout.run_id, rollout.prompt_id) in found:
                found[rollout.run_id, rollout.prompt_id].append(rollout)
        whole = {prompt for prompt in found if prompt[1] not in fetched.missed}
        shards = {
            prompt: (query if prompt in whole else None, rollouts)
            for prompt, rollouts in found.items()
            if prompt in whole or rollouts
        }
        if not shards:
            return
        tokens = sum(len(rollout.tokens) for rollout in fetched.rollouts)
        self._metrics.fetched(time.monotonic() - began, len(fetched.rollouts), tokens)
        await self._deliver(shards)

    def _resolve(self, wants: Sequence[_Want]) -> None:
        for want in wants:
            future = self._wanted.pop(want)
            if not future.done():
                future.set_result(None)
