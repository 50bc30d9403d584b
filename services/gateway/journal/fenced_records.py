"""Records in Redis that outlive the gateway and that only the leader may write: versions, and each run's lenience.

Each reported batch moves the l of its run once (`services.gateway.state.lenience` computes how far), however often
and to whichever gateway it is reported.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from paceline.v1 import sample_pb2
from services.contracts.errors import Unavailable
from services.contracts.gateway_keys import BatchKey, GatewayKeys
from services.gateway.journal import scripts
from services.gateway.metrics import GatewayMetrics
from services.gateway.state.lenience import FLOOR, RunLenience
from services.gateway.state.update_book import PublishedVersion, UpdateBook, WeightUpdate
from services.platform.tasks import ExponentialBackoff

log = structlog.get_logger(__name__)

# Seconds after which the lenience of a run without reports is forgotten.
_KEPT_SECONDS = 30 * 86400
_SAVE_DELAY, _LONGEST_SAVE_DELAY = 0.1, 2.0


class Fenced(Unavailable):
    """Raised when another gateway has taken over."""


async def eval_fenced(redis: Any, script: str, keys: tuple[str, ...], *args: object) -> None:
    """Run a script that checks the lease. Fenced if another gateway holds it."""
    try:
        await redis.eval(script, len(keys), *keys, *args)
    except ResponseError as error:
        if str(error).startswith("FENCED"):
            raise Fenced(str(error)) from error
        raise


class VersionStore:
    """Reader and writer of the UpdateBook, as the holder of the lease."""

    def __init__(self, redis: Redis, namespace: str, token: str) -> None:
        self._redis: Any = redis
        self._keys = GatewayKeys(namespace)
        self._token = token

    async def load(self, abandoned_after: float) -> UpdateBook:
        """Return the book as saved last."""
        published, update = await self._redis.mget(self._keys.published, self._keys.update)
        return UpdateBook(
            abandoned_after,
            PublishedVersion.from_json(published) if published else None,
            WeightUpdate.from_json(update) if update else None,
        )

    async def save(self, book: UpdateBook) -> None:
        """Save the book. Fenced if another gateway has taken over.

        The version that the fleet started with is not saved: the instances themselves report it.
        """
        recorded = book.published is not None and book.published.recorded
        published = book.published.to_json() if book.published and recorded else ""
        update = book.active.to_json() if book.active else ""
        keys = (self._keys.lease, self._keys.published, self._keys.update)
        await eval_fenced(self._redis, scripts.RECORD, keys, self._token, published, update)


async def save_until_stored(store: VersionStore, book: UpdateBook) -> None:
    """Save a change that cannot be undone: repeat until Redis answers."""
    backoff = ExponentialBackoff(_SAVE_DELAY, _LONGEST_SAVE_DELAY)
    while True:
        try:
            return await store.save(book)
        except RedisError as error:
            delay = backoff.failed()
            log.warning("version_not_saved", error=str(error), retry_in=delay)
            await asyncio.sleep(delay)


class Leniences:
    """Leniences of all runs, as the holder of the lease. Methods raise the errors of Redis."""

    def __init__(self, redis: Redis, namespace: str, token: str, metrics: GatewayMetrics) -> None:
        self._redis: Any = redis
        self._keys = GatewayKeys(namespace)
        self._token = token
        self._metrics = metrics
        self._lock = asyncio.Lock()

    async def choose(self, run_id: str, requested: sample_pb2.Exactness) -> float | None:
        """Return the l of a batch (or sample) with this requested exactness; None if its level has none."""
        if requested.level != sample_pb2.EXACTNESS_LEVEL_LENIENT:
            return None
        chosen = requested.lenience if requested.HasField("lenience") else FLOOR
        if requested.HasField("kl_target"):
            known = await self._load(run_id)
            chosen = chosen if known is None else known.lenience
        self._metrics.show_run(run_id, time.time(), lenience=chosen)
        return chosen

    async def report(self, key: BatchKey, used: float, kl: float, target: float) -> None:
        """Adapt the l of a run to the KL measured on one of its batches, which was generated with the l `used`.

        Fenced if another gateway has taken over.
        """
        run_id, batch_id = key
        async with self._lock:
            before = await self._load(run_id) or RunLenience(used)
            after = before.after(batch_id, kl, target)
            if after is before:
                return
            await self._save(run_id, after)
        log.info(
            "lenience_moved", run=run_id, batch=batch_id, kl=kl, target=target, to=after.lenience, used=used
        )

    async def _load(self, run_id: str) -> RunLenience | None:
        text = await self._redis.get(self._keys.lenience(run_id))
        return None if text is None else RunLenience.from_json(text)

    async def _save(self, run_id: str, state: RunLenience) -> None:
        keys = (self._keys.lease, self._keys.lenience(run_id))
        args = (self._token, state.to_json(), _KEPT_SECONDS)
        await eval_fenced(self._redis, scripts.KEEP, keys, *args)
