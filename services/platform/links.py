"""A link to each generation instance that is registered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

import structlog

from services.platform.link import Link
from services.platform.registry import INSTANCES, InstanceRecord, Registry
from services.platform.tasks import end

log = structlog.get_logger(__name__)

_LOOK_SECONDS = 0.25

L = TypeVar("L", bound=Link)


class Links(Generic[L]):
    """Links by instance id, one for each process. `run` until cancelled.

    `dial` makes a link, or raises ValueError where the token must not go. `looked` is called whenever the registry
    was looked at, with what it showed, or None in an outage of Redis: the links stay as they are then.
    """

    def __init__(
        self,
        registry: Registry,
        dial: Callable[[InstanceRecord], L],
        looked: Callable[[dict[str, InstanceRecord] | None], None],
    ) -> None:
        self.known: dict[str, L] = {}
        self._registry = registry
        self._dial = dial
        self._looked = looked
        self._tasks: dict[str, asyncio.Task[None]] = {}
        # Addresses that the token must not be sent to.
        self._refused: set[str] = set()

    async def run(self) -> None:
        """Follows the registry until cancelled, then ends all links."""
        try:
            await self._registry.watch(INSTANCES, _LOOK_SECONDS, self._look)
        finally:
            await end(self._tasks.values())

    async def _look(self, records: dict[str, InstanceRecord] | None) -> None:
        if records is not None:
            await self._drop_others(records)
            for name, record in records.items():
                if name not in self.known and record.address not in self._refused:
                    self._connect(record)
        self._looked(records)

    async def _drop_others(self, records: dict[str, InstanceRecord]) -> None:
        """Ends the links to processes that are not registered any more, and forgets those that failed."""
        for name, link in list(self.known.items()):
            record, task = records.get(name), self._tasks[name]
            known = (link.record.epoch, link.record.address)
            if record is not None and (record.epoch, record.address) == known and not task.done():
                continue
            if task.done() and not task.cancelled():
                log.error("link_failed", instance=name, error=repr(task.exception()))
            del self.known[name], self._tasks[name]
            await end([task])

    def _connect(self, record: InstanceRecord) -> None:
        name = record.instance_id
        try:
            link = self._dial(record)
        except ValueError as error:
            # A mistake in the configuration, which stays one.
            log.error("instance_not_dialled", address=record.address, error=str(error))
            self._refused.add(record.address)
            return
        self.known[name] = link
        self._tasks[name] = asyncio.create_task(link.run(), name=f"link-{name}")
