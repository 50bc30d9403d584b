"""Run the policy service: a registered server, and the knob controller while this process leads.

`PolicyProcess` is the composition root, `PolicyService` the servicer. The controller keeps a link to each instance,
which sends it the knobs in force and fetches its reports. It climbs the ladders at step boundaries and explains its
decisions.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import grpc
import structlog
from prometheus_client import CollectorRegistry
from redis.exceptions import RedisError

from paceline.convert.fleet import knobs_from_proto, knobs_to_proto
from paceline.internal.v1 import policy_pb2 as pb
from paceline.internal.v1 import policy_pb2_grpc as rpc
from paceline.v1 import knobs_pb2
from services.contracts.errors import ServiceError, Unavailable
from services.contracts.knob_store import KnobStore, lease_key
from services.contracts.knobs import KnobScope, Setting, check, check_drafters, setting_of, tallies
from services.platform.grpc.channel import Link, Links
from services.platform.leading import LeadingServer
from services.platform.redis.connection import OUTAGES, Keys
from services.platform.redis.decision_log import DecisionLog, DecisionRecord
from services.platform.redis.registry import InstanceRecord, Registry
from services.platform.tasks import until_one_ends
from services.policy import steps
from services.policy.config import PolicyConfig
from services.policy.knobs_in_force import KnobsInForce, effective, in_scope
from services.policy.metrics import PolicyMetrics
from services.policy.scaling.scaler import Scaler
from services.policy.steps import StepEnd, StepStatistics, climb, start

log = structlog.get_logger(__name__)

SERVICE = "policy"
"""Name in the registry."""
_TICK_SECONDS = 0.25

Context = grpc.aio.ServicerContext[Any, Any]
TakeReport = Callable[[InstanceRecord, pb.GetSpeculationReportResponse], None]


class KnobLink(Link):
    """Link to one process of an instance.

    `applied` is the latest revision that the process is known to use, -1 before the first. `report` is its
    latest report, None before the first.
    """

    def __init__(
        self,
        record: InstanceRecord,
        config: PolicyConfig,
        knobs: KnobsInForce,
        take_report: TakeReport,
        metrics: PolicyMetrics,
    ) -> None:
        super().__init__(record, config, knobs.changed, metrics.pushes.labels("failed"))
        self.applied = -1
        self._config = config
        self._knobs = knobs
        self._take_report = take_report
        self._metrics = metrics
        self._stub: Any = rpc.KnobServiceStub(self._channel)
        self.report: pb.GetSpeculationReportResponse | None = None
        self._switch = 0
        self._due = 0.0
        self._loop = asyncio.get_running_loop()

    async def call(self) -> float:
        """Fetch a report when it is due, and push a new revision. Returns the seconds until the next report."""
        now = self._loop.time()
        if self.report is None or now >= self._due:
            self.report = await self._fetch_report()
            self._due = now + self._config.report_seconds
        if self.applied < self._knobs.revision:
            await self._push(self.report)
        return max(0.0, self._due - self._loop.time())

    async def _fetch_report(self) -> pb.GetSpeculationReportResponse:
        request = pb.GetSpeculationReportRequest(after_switch=self._switch)
        report = await self._stub.GetSpeculationReport(request, timeout=self._config.push_timeout_seconds)
        self._switch = max([self._switch, *(each.serial for each in report.switches)])
        if self.report is None and report.revision:
            # Knobs of an earlier leader, or read by the instance when it started.
            log.info("instance_has_knobs", instance=self.record.instance_id, revision=report.revision)
        self._take_report(self.record, report)
        return report

    async def _push(self, report: pb.GetSpeculationReportResponse) -> None:
        request = self._knobs.request_for(report)
        answer = await self._stub.ApplyKnobs(request, timeout=self._config.push_timeout_seconds)
        if answer.revision > request.revision:
            # The instance has a later revision than Redis, which has lost data.
            self._metrics.pushes.labels("behind").inc()
            await self._knobs.exceed(answer.revision)
            return
        self.applied = answer.revision
        self._knobs.answered.notify()
        self._metrics.pushes.labels("applied").inc()
        self._metrics.push_seconds.observe(self._knobs.seconds_since(request.revision))
        log.info("knobs_pushed", instance=self.record.instance_id, revision=answer.revision)


class KnobLinks(Links[KnobLink]):
    """Links to all registered instances. `run` them until cancelled."""

    def __init__(
        self,
        config: PolicyConfig,
        registry: Registry,
        knobs: KnobsInForce,
        take_report: TakeReport,
        metrics: PolicyMetrics,
    ) -> None:
        def dial(record: InstanceRecord) -> KnobLink:
            return KnobLink(record, config, knobs, take_report, metrics)

        super().__init__(registry, dial, self._show)
        self._knobs = knobs
        self._metrics = metrics

    async def applied(self, revision: int, seconds: float) -> tuple[list[str], list[str]]:
        """Wait at most `seconds` until every instance uses a revision; return the ids that do, and the others."""
        try:
            async with asyncio.timeout(seconds):
                while self._split(revision)[1]:
                    await self._knobs.answered.wait()
        except TimeoutError:
            pass
        return self._split(revision)

    @property
    def drafters(self) -> set[str]:
        """Names of the drafters in the reports of instances."""
        reports = [link.report for link in self.known.values() if link.report is not None]
        return {name for each in reports for name in knobs_from_proto(each.own_knobs).get("drafters", {})}

    def used(self, scope: KnobScope) -> tuple[list[knobs_pb2.EffectiveKnobs], list[str]]:
        """Return the knobs in use by the instances of a scope, and the ids of instances whose knobs are unknown."""
        reports, pending = {}, []
        for instance_id, link in self.known.items():
            if link.report is None:
                # Its scope is unknown yet.
                pending.append(instance_id)
            elif not in_scope(link.report, scope):
                continue
            elif link.applied < self._knobs.revision:
                pending.append(instance_id)
            else:
                reports[instance_id] = link.report
        if pending and not reports:
            return [], sorted(pending)
        found, unreported = effective(self._knobs.records, scope, reports)
        return found, sorted([*pending, *unreported])

    def _split(self, revision: int) -> tuple[list[str], list[str]]:
        names = sorted(self.known)
        done = [name for name in names if self.known[name].applied >= revision]
        return done, [name for name in names if name not in done]

    def _show(self, _: dict[str, InstanceRecord] | None) -> None:
        # Wakes callers of `applied`, which must not wait for an instance that is gone.
        self._knobs.answered.notify()
        done, others = self._split(self._knobs.revision)
        self._metrics.instances.labels("current").set(len(done))
        self._metrics.instances.labels("behind").set(len(others))


class KnobController:
    """One term of leadership: `run` it until it is cancelled."""

    def __init__(
        self,
        config: PolicyConfig,
        knobs: KnobsInForce,
        registry: Registry,
        decisions: DecisionLog,
        metrics: PolicyMetrics,
    ) -> None:
        self.knobs = knobs
        self.links = KnobLinks(config, registry, knobs, self._take_report, metrics)
        self._config = config
        self._decisions = decisions
        self._metrics = metrics
        self._statistics = StepStatistics(config.settle_seconds, config.report_seconds)
        # The latest step for which the ladder of a run was climbed.
        self._climbed: dict[str, int] = {}

    async def run(self) -> None:
        """Keep instances up to date and follow their steps until cancelled."""
        await until_one_ends(
            [
                asyncio.create_task(self.links.run(), name="links"),
                asyncio.create_task(self._watch_steps(), name="steps"),
            ]
        )

    async def set(
        self, scope: KnobScope, revision: int, setting: Setting
    ) -> tuple[int, list[str], list[str]]:
        """Store a setting and send it to the instances.

        Returns:
            The new revision, the instances that use it, and those that have not answered in time.

        Raises:
            InvalidArgument: a knob or value that is not allowed.
            Aborted: the scope was changed since that revision.
            ResourceExhausted: too many scopes have settings.
            Unavailable: another process leads, or Redis cannot be reached.
        """
        knobs, before = check(setting), self.knobs.setting(scope)
        check_drafters(knobs, self.links.drafters)
        made = await self.knobs.set(scope, revision, knobs)
        applied, pending = await self.links.applied(self.knobs.revision, self._config.answer_seconds)
        log.info("knobs_set", scope=scope.key, revision=made, knobs=knobs, pending=pending)
        self._explain(steps.knobs_set(scope, before.knobs, knobs, made, pending, time.time()))
        return made, applied, pending

    def _take_report(self, instance: InstanceRecord, report: pb.GetSpeculationReportResponse) -> None:
        self._statistics.report((instance.instance_id, report.epoch), tallies(report.steps), time.time())
        for switch in report.switches:
            self._explain(steps.switched(switch, instance.instance_id))

    async def _watch_steps(self) -> None:
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            for ended in self._statistics.ended(time.time()):
                self._explain(steps.step_ended(ended, time.time()))
                if ended.totals.acceptance.verifications:
                    self._metrics.block_efficiency.set(ended.totals.acceptance.block_efficiency)
                try:
                    await self._climb(ended)
                except (ServiceError, RedisError) as error:
                    # The ladder keeps its position; the next step may move it.
                    log.warning("ladder_not_kept", run_id=ended.run_id, error=str(error))

    async def _climb(self, ended: StepEnd) -> None:
        run_id, records = ended.run_id, self.knobs.records
        knobs = records.knobs_of(run_id)
        # Once per step, even if further reports of the step arrive later.
        if not knobs.ladder.on or not run_id or self._climbed.get(run_id, -1) >= ended.step:
            return
        first = run_id not in records.rungs
        before = records.rungs.get(run_id) or start(knobs.ladder, knobs.draft_cap)
        move = climb(knobs.ladder, before, ended.totals.acceptance)
        await self.knobs.climb(run_id, move.rung, move.moved or first)
        self._climbed[run_id] = ended.step
        self._climbed = {each: step for each, step in self._climbed.items() if each in records.rungs}
        if move.moved:
            self._explain(steps.cap_moved(ended, before, move, time.time()))

    def _explain(self, decision: DecisionRecord) -> None:
        self._metrics.decisions.labels(decision.kind).inc()
        self._decisions.post(decision)


class PolicyService(rpc.PolicyServiceServicer):
    """Servicer of knobs. `leading` returns the controller, or raises Unavailable while another process leads."""

    def __init__(self, leading: Callable[[], KnobController]) -> None:
        self._leading = leading

    async def GetKnobs(self, request: pb.GetKnobsRequest, context: Context) -> pb.GetKnobsResponse:
        """Return the setting of a scope itself, the cap of a run's ladder, and the knobs that instances use."""
        controller = self._leading()
        scope = KnobScope.of_request(request.run_id, request.model, request.pool)
        stored = controller.knobs.setting(scope)
        used, pending = controller.links.used(scope)
        rung = controller.knobs.records.rungs.get(request.run_id) if request.run_id else None
        return pb.GetKnobsResponse(
            revision=stored.revision,
            knobs=knobs_to_proto(stored.knobs),
            ladder_cap=rung.cap if rung is not None else 0,
            effective=used,
            pending_instance_ids=pending,
        )

    async def SetKnobs(self, request: pb.SetKnobsRequest, context: Context) -> pb.SetKnobsResponse:
        """Store a setting, and answer once the reachable instances use it."""
        controller = self._leading()
        scope = KnobScope.of_request(request.run_id, request.model, request.pool)
        try:
            revision, applied, pending = await controller.set(
                scope, request.revision, setting_of(request.knobs)
            )
        except OUTAGES as error:
            raise Unavailable(f"the knobs could not be stored: {error}") from error
        return pb.SetKnobsResponse(revision=revision, applied=applied, pending=pending)


class PolicyProcess(LeadingServer[KnobController]):
    """Composition root of the service. Usage: `start`, then `run` until it is cancelled, then `stop`."""

    def __init__(self, config: PolicyConfig, registry: CollectorRegistry, metrics_port: int = 0) -> None:
        self._config = config
        self._metrics = PolicyMetrics(registry)
        super().__init__(
            config,
            SERVICE,
            config.instance_id,
            title="policy service",
            lease=lease_key(config.namespace),
            open_term=self._open,
            leader=self._metrics.leader,
            registry=registry,
            metrics_port=metrics_port,
        )
        self._decisions = DecisionLog(self.redis, config.namespace)
        self.work.append(self._decisions.run)
        if config.scaling.pools:
            self.work.append(Scaler(config, config.scaling, registry, self._explain).run)
        rpc.add_PolicyServiceServicer_to_server(PolicyService(self.leadership.leading), self.server.server)

    async def _open(self, term: int) -> KnobController:
        store = KnobStore(self.redis, self._config.namespace, term)
        knobs = await KnobsInForce.load(store, self._metrics)
        registry = Registry(self.redis, Keys(self._config.namespace))
        return KnobController(self._config, knobs, registry, self._decisions, self._metrics)

    async def _explain(self, decision: DecisionRecord) -> None:
        # Standbys recommend as well, for their metrics; only the leader explains.
        if self.leadership.term is not None:
            await self._decisions.write(decision)
