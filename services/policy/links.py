"""The way to one instance: brings it the knobs and asks for its report, again and again."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

import structlog

from paceline.internal.v1 import policy_pb2 as pb
from paceline.internal.v1 import policy_pb2_grpc as rpc
from services.platform.link import Link
from services.platform.pulse import Pulse
from services.platform.registry import InstanceRecord
from services.policy.config import PolicyConfig
from services.policy.metrics import PolicyMetrics

log = structlog.get_logger(__name__)


class Source(Protocol):
    """What instances are told, and who hears what they say."""

    changed: Pulse
    answered: Pulse

    @property
    def revision(self) -> int: ...

    def request_for(self, report: pb.GetPolicyReportResponse) -> pb.ApplyKnobsRequest: ...

    def changed_at(self, revision: int) -> float: ...

    def heard(self, instance: InstanceRecord, report: pb.GetPolicyReportResponse) -> None: ...

    async def ahead(self, revision: int) -> None: ...


class KnobLink(Link):
    """One process of an instance. `applied` is the latest revision that it is known to work by, -1 before it has
    taken any."""

    def __init__(
        self, record: InstanceRecord, config: PolicyConfig, source: Source, metrics: PolicyMetrics
    ) -> None:
        super().__init__(record, config, source.changed, metrics.pushes.labels("failed"))
        self.applied = -1
        self._config = config
        self._source = source
        self._metrics = metrics
        self._stub: Any = rpc.KnobServiceStub(self._channel)
        self._report: pb.GetPolicyReportResponse | None = None
        self._switch = 0
        self._due = 0.0
        self._loop = asyncio.get_running_loop()

    async def call(self) -> float:
        """Asks when that is due, and pushes what is new; seconds until it is due again."""
        now = self._loop.time()
        if self._report is None or now >= self._due:
            await self._ask()
            self._due = now + self._config.report_seconds
        if self._report is not None and self.applied < self._source.revision:
            await self._push(self._report)
        return max(0.0, self._due - self._loop.time())

    async def _ask(self) -> None:
        request = pb.GetPolicyReportRequest(after_switch=self._switch)
        report = await self._stub.GetPolicyReport(request, timeout=self._config.push_timeout_seconds)
        self._switch = max([self._switch, *(each.serial for each in report.switches)])
        if self._report is None and report.revision:
            # It has knobs of an earlier leader, or those it read when it started.
            log.info("instance_has_knobs", instance=self.record.instance_id, revision=report.revision)
        self._report = report
        self._source.heard(self.record, report)

    async def _push(self, report: pb.GetPolicyReportResponse) -> None:
        request = self._source.request_for(report)
        answer = await self._stub.ApplyKnobs(request, timeout=self._config.push_timeout_seconds)
        if answer.revision > request.revision:
            # It knows of a later change than Redis does: Redis has lost something.
            self._metrics.pushes.labels("behind").inc()
            await self._source.ahead(answer.revision)
            return
        self.applied = answer.revision
        self._source.answered.beat()
        self._metrics.pushes.labels("applied").inc()
        taken = self._loop.time() - self._source.changed_at(request.revision)
        self._metrics.push_seconds.observe(max(0.0, taken))
        log.info("knobs_pushed", instance=self.record.instance_id, revision=answer.revision)
