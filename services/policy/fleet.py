"""The instances that are registered, and a link to each."""

from __future__ import annotations

import asyncio

import structlog

from services.gateway.tasks import end
from services.platform.registry import InstanceRecord, Registry
from services.platform.store import OUTAGES
from services.policy.config import PolicyConfig
from services.policy.links import Link, Source
from services.policy.metrics import PolicyMetrics

log = structlog.get_logger(__name__)

SERVICE = "generation"
"""Name of the instances in the registry."""
_LOOK_SECONDS = 0.25


class Fleet:
    """A link for each process that is registered. `run` until cancelled."""

    def __init__(
        self, config: PolicyConfig, registry: Registry, source: Source, metrics: PolicyMetrics
    ) -> None:
        self.links: dict[str, Link] = {}
        self._config = config
        self._registry = registry
        self._source = source
        self._metrics = metrics
        self._tasks: dict[str, asyncio.Task[None]] = {}
        # Addresses that the token must not be sent to.
        self._refused: set[str] = set()

    async def run(self) -> None:
        """Follows the registry; in an outage the links stay as they are."""
        task = asyncio.current_task()
        try:
            # A cancellation that lands inside a Redis command can get lost, hence the question.
            while task is None or not task.cancelling():
                try:
                    await self._match(await self._registry.list(SERVICE))
                except OUTAGES as error:
                    log.warning("registry_unreachable", error=str(error))
                self._show()
                await asyncio.sleep(_LOOK_SECONDS)
            raise asyncio.CancelledError
        finally:
            await end(self._tasks.values())

    async def brought(self, revision: int, seconds: float) -> tuple[list[str], list[str]]:
        """Waits until all work by a revision, or for so long: ids of those that do, and of the others."""
        try:
            async with asyncio.timeout(seconds):
                while self._split(revision)[1]:
                    await self._source.answered.wait()
        except TimeoutError:
            pass
        return self._split(revision)

    def _split(self, revision: int) -> tuple[list[str], list[str]]:
        names = sorted(self.links)
        done = [name for name in names if self.links[name].applied >= revision]
        return done, [name for name in names if name not in done]

    async def _match(self, records: dict[str, InstanceRecord]) -> None:
        for name, link in list(self.links.items()):
            record, task = records.get(name), self._tasks[name]
            known = (link.record.epoch, link.record.address)
            if record is not None and (record.epoch, record.address) == known and not task.done():
                continue
            if task.done() and not task.cancelled():
                log.error("link_failed", instance=name, error=repr(task.exception()))
            del self.links[name], self._tasks[name]
            await end([task])
            self._source.answered.beat()
        for name, record in records.items():
            if name not in self.links and record.address not in self._refused:
                self._connect(record)

    def _connect(self, record: InstanceRecord) -> None:
        try:
            link = Link(record, self._config, self._source, self._metrics)
        except ValueError as error:
            # The token may not go there: a mistake in the configuration, which stays one.
            log.error("instance_not_dialled", address=record.address, error=str(error))
            self._refused.add(record.address)
            return
        name = record.instance_id
        self.links[name] = link
        self._tasks[name] = asyncio.create_task(link.run(), name=f"link-{name}")

    def _show(self) -> None:
        done, others = self._split(self._source.revision)
        self._metrics.instances.labels("current").set(len(done))
        self._metrics.instances.labels("behind").set(len(others))
