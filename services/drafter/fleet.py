"""The instances that are registered, and how they stand to the published drafter."""

from __future__ import annotations

from services.drafter.canary import Live
from services.drafter.config import DrafterConfig
from services.drafter.gate import Loading, judge_loading
from services.drafter.links import DrafterLink, Source, Stand
from services.drafter.metrics import DrafterMetrics
from services.platform.links import Links
from services.platform.registry import InstanceRecord, Registry


class Fleet:
    """A link for each process that is registered. `busy`: an instance has samples. `run` until cancelled."""

    def __init__(
        self, config: DrafterConfig, registry: Registry, source: Source, metrics: DrafterMetrics
    ) -> None:
        links = Links(registry, lambda record: DrafterLink(record, config, source, metrics), self._looked)
        self.run = links.run
        self.links: dict[str, DrafterLink] = links.known
        self.busy = False
        self._metrics = metrics

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

    def _looked(self, records: dict[str, InstanceRecord] | None) -> None:
        if records is not None:
            self.busy = any(record.samples for record in records.values())
        stands = [link.stand for link in self.links.values()]
        for stand in Stand:
            self._metrics.instances.labels(stand.value).set(stands.count(stand))
