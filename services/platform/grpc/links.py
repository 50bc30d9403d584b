"""Links to all registered generation instances, each called in rounds."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

import grpc
import structlog
from prometheus_client import Counter

from services.platform.backoff import ExponentialBackoff
from services.platform.config.settings import ServiceConfig
from services.platform.grpc.channel import open_channel
from services.platform.notify import Notifier
from services.platform.redis.registry import INSTANCES, InstanceRecord, Registry
from services.platform.tasks import end

log = structlog.get_logger(__name__)

FIRST_DELAY, LONGEST_DELAY = 0.1, 2.0
"""Seconds until the next round after one that failed, doubling with each in a row."""
_LOOK_SECONDS = 0.25


class Link(ABC):
    """One process, called in rounds (`call`). `run` until cancelled."""

    def __init__(
        self, record: InstanceRecord, config: ServiceConfig, changed: Notifier, failures: Counter
    ) -> None:
        """Make a link; a notification of `changed` begins a round at once, and `failures` counts failed rounds.

        ValueError if the token would travel to the process in plain text.
        """
        self.record = record
        self._channel = open_channel(record.address, config)
        self._changed = changed
        self._failures = failures
        self._backoff = ExponentialBackoff(FIRST_DELAY, LONGEST_DELAY)

    @abstractmethod
    async def call(self) -> float:
        """Make one round of calls and return the seconds until the next one.

        An AioRpcError makes it a failed round.
        """

    async def run(self) -> None:
        """Keep the process up to date until cancelled."""
        try:
            while True:
                # Marked before the look, so that no change is missed.
                mark = self._changed.next_change()
                pause = await self._once()
                try:
                    async with asyncio.timeout(pause):
                        await mark.wait()
                except TimeoutError:
                    continue
        finally:
            await self._channel.close()

    async def _once(self) -> float:
        try:
            pause = await self.call()
        except grpc.aio.AioRpcError as error:
            return self._failed(error)
        self._backoff.succeeded()
        return pause

    def _failed(self, error: grpc.aio.AioRpcError) -> float:
        self._failures.inc()
        if self._backoff.failures == 0:
            log.warning(
                "instance_unreachable",
                instance=self.record.instance_id,
                error=f"{error.code().name}: {error.details()}",
            )
        return self._backoff.failed()


L = TypeVar("L", bound=Link)


class Links(Generic[L]):
    """Links by instance id, one for each process. `run` until cancelled.

    `dial` makes a link, or raises ValueError if the token must not be sent there. `looked` receives the records
    after each read of the registry, or None in an outage of Redis: the links stay as they are then.
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
        """Follow the registry until cancelled, then end all links."""
        try:
            await self._registry.watch(INSTANCES, _LOOK_SECONDS, self._look)
        finally:
            await end(self._tasks.values())

    async def _look(self, records: dict[str, InstanceRecord] | None) -> None:
        if records is not None:
            await self._drop_others(records)
            self._refused &= {record.address for record in records.values()}
            for name, record in records.items():
                if name not in self.known and record.address not in self._refused:
                    self._connect(record)
        self._looked(records)

    async def _drop_others(self, records: dict[str, InstanceRecord]) -> None:
        """End links to processes that are no longer registered, and forget failed ones."""
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
