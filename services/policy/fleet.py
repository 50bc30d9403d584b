"""The instances that are registered, and how they stand to the latest knobs."""

from __future__ import annotations

import asyncio

from services.platform.links import Links
from services.platform.registry import InstanceRecord, Registry
from services.policy.config import PolicyConfig
from services.policy.links import KnobLink, Source
from services.policy.metrics import PolicyMetrics


class Fleet:
    """A link for each process that is registered. `run` until cancelled."""

    def __init__(
        self, config: PolicyConfig, registry: Registry, source: Source, metrics: PolicyMetrics
    ) -> None:
        links = Links(registry, lambda record: KnobLink(record, config, source, metrics), self._looked)
        self.run = links.run
        self.links: dict[str, KnobLink] = links.known
        self._source = source
        self._metrics = metrics

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

    def _looked(self, _: dict[str, InstanceRecord] | None) -> None:
        # Nobody is to wait for an instance that is gone.
        self._source.answered.beat()
        done, others = self._split(self._source.revision)
        self._metrics.instances.labels("current").set(len(done))
        self._metrics.instances.labels("behind").set(len(others))
