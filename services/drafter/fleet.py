"""The instances that are registered, and a link to each."""

from __future__ import annotations

import asyncio

import structlog

from services.drafter.canary import Live
from services.drafter.config import DrafterConfig
from services.drafter.gate import Loading, judge_loading
from services.drafter.links import Link, Source, Stand
from services.drafter.metrics import DrafterMetrics
from services.gateway.tasks import end
from services.platform.registry import InstanceRecord, Registry
from services.platform.store import OUTAGES

log = structlog.get_logger(__name__)

SERVICE = "generation"
"""Name of the instances in the registry."""
_LOOK_SECONDS = 0.25


class Fleet:
    """A link for each process that is registered. `busy`: an instance has samples. `run` until cancelled."""

    def __init__(
        self, config: DrafterConfig, registry: Registry, source: Source, metrics: DrafterMetrics
    ) -> None:
        self.links: dict[str, Link] = {}
        self.busy = False
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
                    records = await self._registry.list(SERVICE)
                except OUTAGES as error:
                    log.warning("registry_unreachable", error=str(error))
                else:
                    self.busy = any(_samples(record) for record in records.values())
                    await self._match(records)
                self._show()
                await asyncio.sleep(_LOOK_SECONDS)
            raise asyncio.CancelledError
        finally:
            await end(self._tasks.values())

    def live(self, version: int) -> Live:
        """What became of the drafts of a version, over all instances that use it now."""
        return sum((link.live for link in self.links.values() if link.version == version), Live())

    @property
    def highest(self) -> int:
        """The highest version that any instance has."""
        return max((link.version for link in self.links.values()), default=0)

    def loading(self) -> Loading:
        """How the instances take what is published."""
        stands = [link.stand for link in self.links.values()]
        loaded, refused = stands.count(Stand.CURRENT), stands.count(Stand.REFUSED)
        return judge_loading(loaded, refused, stands.count(Stand.BEHIND))

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
        stands = [link.stand for link in self.links.values()]
        for stand in Stand:
            self._metrics.instances.labels(stand.value).set(stands.count(stand))


def _samples(record: InstanceRecord) -> int:
    return int(record.load.get("running", 0)) + int(record.load.get("waiting", 0))
