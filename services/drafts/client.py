"""The draft store as gateway and instances use it."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence

import structlog

from services.drafts.fetched import Fetched
from services.drafts.replica import Replica
from services.drafts.ring import owner
from services.drafts.rollout import Rollout
from services.platform.config import ServiceConfig
from services.platform.registry import InstanceRecord, Registry

log = structlog.get_logger(__name__)

SERVICE = "drafts"
"""Name of the store's replicas in the registry."""
POLL_SECONDS = 0.5
"""How often the registry is read."""


class DraftStores:
    """All replicas of the store, found through the registry.

    An outage costs drafts, never an error or a wait beyond `timeout` (seconds). A replica that failed is
    left alone for a pause that doubles from 0.5 to 10 seconds; meanwhile its prompts have no drafts.

    Usage: `run()` in a task of its own until the end, then `close()`. Before the first reading of the
    registry there are no replicas, and nothing is stored or found.
    """

    def __init__(self, config: ServiceConfig, registry: Registry, *, timeout: float = 1.0) -> None:
        self._config = config
        self._registry = registry
        self._timeout = timeout
        self._replicas: dict[str, Replica] = {}
        self._refused: set[str] = set()
        """Addresses that the token must not be sent to."""

    @property
    def available(self) -> bool:
        """Whether some replica is known that would be called now."""
        return any(replica.ready for replica in self._replicas.values())

    @property
    def replicas(self) -> frozenset[str]:
        """Ids of the replicas that are registered, as far as known."""
        return frozenset(self._replicas)

    async def run(self) -> None:
        """Watches the registry until cancelled; outlasts outages of Redis."""
        await self._registry.watch(SERVICE, POLL_SECONDS, self._look)

    async def put(self, rollouts: Sequence[Rollout]) -> int:
        """Stores rollouts, each on the replica of its prompt; returns how many were taken.

        What has no tokens is left out. What a replica cannot be given is lost: 0 when there is none.
        """
        shares: dict[str, list[Rollout]] = defaultdict(list)
        for rollout in rollouts:
            replica_id = owner(rollout.run_id, rollout.prompt_id, self._replicas)
            if replica_id is not None and len(rollout.tokens):
                shares[replica_id].append(rollout)
        calls = [self._replicas[name].put(share, self._timeout) for name, share in shares.items()]
        return sum(await asyncio.gather(*calls))

    async def fetch(self, run_id: str, prompt_ids: Sequence[str]) -> Fetched:
        """All rollouts of the prompts of a run, as far as they could be had within `timeout`. Prompts of a replica
        that did not answer are missed, and so are all while there is none."""
        if not self._replicas:
            return Fetched([], frozenset(prompt_ids))
        shares: dict[str, list[str]] = defaultdict(list)
        for prompt_id in dict.fromkeys(prompt_ids):
            replica_id = owner(run_id, prompt_id, self._replicas)
            assert replica_id is not None, "there are replicas"
            shares[replica_id].append(prompt_id)
        calls = [self._replicas[name].fetch(run_id, ids, self._timeout) for name, ids in shares.items()]
        parts = await asyncio.gather(*calls)
        rollouts = [rollout for part in parts for rollout in part.rollouts]
        return Fetched(rollouts, frozenset().union(*(part.missed for part in parts)))

    async def close(self) -> None:
        """Ends all connections. `run` must have ended."""
        replicas, self._replicas = self._replicas, {}
        await asyncio.gather(*(replica.close() for replica in replicas.values()))

    async def _look(self, records: dict[str, InstanceRecord] | None) -> None:
        if records is None:
            # What is known stays in use: the replicas may well be alive.
            return
        gone = [each for name, each in self._replicas.items() if not _same(each, records.get(name))]
        for replica in gone:
            log.info("draft_store_gone", replica=replica.replica_id, epoch=replica.epoch)
            del self._replicas[replica.replica_id]
        for name, record in records.items():
            if name not in self._replicas:
                self._add(record)
        await asyncio.gather(*(replica.close() for replica in gone))

    def _add(self, record: InstanceRecord) -> None:
        name = record.instance_id
        try:
            self._replicas[name] = Replica(name, record.epoch, record.address, self._config)
        except ValueError as error:
            if record.address not in self._refused:
                log.warning("draft_store_refused", replica=name, error=str(error))
            self._refused.add(record.address)
        else:
            log.info("draft_store_found", replica=name, epoch=record.epoch, address=record.address)


def _same(replica: Replica, record: InstanceRecord | None) -> bool:
    return record is not None and (record.epoch, record.address) == (replica.epoch, replica.address)
