"""What a leading policy service knows and does: settings, ladders, instances, decisions."""

from __future__ import annotations

import asyncio
import time
import uuid

import structlog
from pydantic import ValidationError
from redis.exceptions import RedisError

from paceline.internal.v1 import policy_pb2 as pb
from services.platform.decisions import Decision, DecisionLog
from services.platform.errors import Aborted, ServiceError
from services.platform.pulse import Pulse
from services.platform.registry import InstanceRecord, Registry
from services.platform.tasks import is_cancelled, until_one_ends
from services.policy import explain
from services.policy.config import PolicyConfig
from services.policy.convert import apply_request, tallies
from services.policy.fleet import Fleet
from services.policy.knobs import Scope, Setting, check
from services.policy.ladder import climb, start
from services.policy.metrics import PolicyMetrics
from services.policy.steps import StepBook, StepEnd
from services.policy.store import MAX_LADDERS, KnobStore, Known, Stored
from services.policy.stored import Calibration

log = structlog.get_logger(__name__)

_TICK_SECONDS = 0.25
# Decisions that wait to be written; of more, the oldest go.
_MAX_UNTOLD = 1000


class Controller:
    """One term of leadership. Build it with `open`, then `run` it until it is cancelled."""

    def __init__(
        self,
        config: PolicyConfig,
        store: KnobStore,
        registry: Registry,
        decisions: DecisionLog,
        metrics: PolicyMetrics,
        known: Known,
        calibrations: dict[str, Calibration],
    ) -> None:
        self.changed, self.answered = Pulse(), Pulse()
        self.fleet = Fleet(config, registry, self, metrics)
        self.known = known
        self._config = config
        self._store = store
        self._decisions = decisions
        self._metrics = metrics
        self._calibrations = calibrations
        self._book = StepBook(config.settle_seconds)
        self._climbed: dict[str, int] = {}
        self._untold: asyncio.Queue[Decision] = asyncio.Queue(_MAX_UNTOLD)
        self._changed_at = {known.revision: asyncio.get_running_loop().time()}
        metrics.revision.set(known.revision)

    @classmethod
    async def open(
        cls,
        config: PolicyConfig,
        store: KnobStore,
        registry: Registry,
        decisions: DecisionLog,
        metrics: PolicyMetrics,
        renewed: bool = False,
    ) -> Controller:
        """Reads what former leaders left. Raises what Redis raises.

        `renewed`: there are new calibrations, which instances take with a new revision only.
        """
        known = await store.load()
        known.revision = await store.raise_to(known.revision + renewed)
        return cls(config, store, registry, decisions, metrics, known, _parsed(await store.calibrations()))

    async def run(self) -> None:
        """Works until cancelled."""
        tasks = [
            asyncio.create_task(self.fleet.run(), name="fleet"),
            asyncio.create_task(self._watch_steps(), name="steps"),
            asyncio.create_task(self._tell(), name="decisions"),
        ]
        await until_one_ends(tasks)

    # Knobs ------------------------------------------------------------------------------------------------

    def get(self, scope: Scope) -> Stored:
        """A scope's own setting."""
        return self.known.settings.get(scope, Stored())

    async def set(self, scope: Scope, revision: int, setting: Setting) -> tuple[int, list[str], list[str]]:
        """Keeps a setting and brings it to the instances.

        Returns the new revision, the instances that work by it, and those that had not answered in time.

        Raises:
            InvalidArgument: a knob or value that is not allowed.
            Aborted: the scope was changed since that revision.
            ResourceExhausted: too many scopes have settings.
            Unavailable: another process leads, or Redis is away.
        """
        knobs, before = check(setting), self.get(scope)
        try:
            made = await self._store.set(scope, revision, knobs, uuid.uuid4().hex)
        except Aborted:
            await self._read_again()
            raise
        self.known.settings[scope] = Stored(made, knobs)
        self._advance(made)
        applied, pending = await self.fleet.brought(made, self._config.answer_seconds)
        log.info("knobs_set", scope=scope.key, revision=made, knobs=knobs, pending=pending)
        self._decide(explain.knobs_set(scope, before.knobs, knobs, made, pending, time.time()))
        return made, applied, pending

    async def _read_again(self) -> None:
        """A Redis that came back without what it had: what it has now is in force, and what callers are told."""
        kept = await self._store.load()
        if kept.settings != self.known.settings:
            log.warning("settings_lost", known=len(self.known.settings), kept=len(kept.settings))
            self.known.settings, self.known.rungs = kept.settings, kept.rungs
            self._advance(await self._store.raise_to(self.revision + 1))

    # As instances see it ------------------------------------------------------------------------------------

    @property
    def revision(self) -> int:
        """The latest of any change."""
        return self.known.revision

    def changed_at(self, revision: int) -> float:
        """When a revision was made, by the loop's clock."""
        return self._changed_at.get(revision, asyncio.get_running_loop().time())

    def request_for(self, report: pb.GetPolicyReportResponse) -> pb.ApplyKnobsRequest:
        """Everything that an instance is to work by."""
        shared, runs = self.known.settings_for(report.model, report.pool)
        calibration = self._calibrations.get(report.calibration)
        step_time = calibration.step_time.model_dump_json() if calibration is not None else ""
        return apply_request(self.revision, shared, runs, self.known.caps(), step_time)

    def heard(self, instance: InstanceRecord, report: pb.GetPolicyReportResponse) -> None:
        """An instance said what became of its drafts."""
        self._book.report((instance.instance_id, report.epoch), tallies(report.steps), time.time())
        for each in report.switches:
            decision = explain.switched(
                each.on,
                each.predicted_speedup,
                each.requests,
                each.run_id,
                each.step,
                instance.instance_id,
                each.time.ToNanoseconds() / 1e9,
            )
            self._decide(decision)

    async def ahead(self, revision: int) -> None:
        """An instance knows a revision that Redis does not: ours go on above it."""
        try:
            self._advance(await self._store.raise_to(revision + 1))
        except (ServiceError, RedisError) as error:
            log.warning("revision_not_raised", error=str(error))

    # Steps --------------------------------------------------------------------------------------------------

    async def _watch_steps(self) -> None:
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            for ended in self._book.ended(time.time()):
                self._decide(explain.step_ended(ended, time.time()))
                if ended.totals.acceptance.verifications:
                    self._metrics.block_efficiency.set(ended.totals.acceptance.block_efficiency)
                try:
                    await self._climb(ended)
                except (ServiceError, RedisError) as error:
                    # The ladder stays where it is; the next step will move it.
                    log.warning("ladder_not_kept", run_id=ended.run_id, error=str(error))

    async def _climb(self, ended: StepEnd) -> None:
        run_id, knobs = ended.run_id, self.known.knobs_of(ended.run_id)
        # Once a step, whatever comes late of it.
        if not knobs.ladder.on or not run_id or self._climbed.get(run_id, -1) >= ended.step:
            return
        first = run_id not in self.known.rungs
        before = self.known.rungs.get(run_id) or start(knobs.ladder, knobs.draft_cap)
        move = climb(knobs.ladder, before, ended.totals.acceptance)
        revision = await self._store.climb(run_id, move.rung, move.moved or first, time.time())
        self._climbed[run_id] = ended.step
        self.known.rungs[run_id] = move.rung
        while len(self.known.rungs) > MAX_LADDERS:
            self._forget(next(each for each in self.known.rungs if each != run_id))
        self._metrics.draft_cap.labels(run_id).set(move.rung.cap)
        self._advance(revision)
        if move.moved:
            self._decide(explain.cap_moved(ended, before, move, time.time()))

    def _forget(self, run_id: str) -> None:
        del self.known.rungs[run_id]
        if self._climbed.pop(run_id, None) is not None:
            self._metrics.draft_cap.remove(run_id)

    def _advance(self, revision: int) -> None:
        if revision <= self.known.revision:
            return
        self.known.revision = revision
        self._changed_at = {revision: asyncio.get_running_loop().time()}
        self._metrics.revision.set(revision)
        self.changed.beat()

    def _decide(self, decision: Decision) -> None:
        """Explains a decision, some time: who decides does not wait for Redis."""
        self._metrics.decisions.labels(decision.kind).inc()
        if self._untold.full():
            log.warning("decision_dropped", kind=self._untold.get_nowait().kind)
        self._untold.put_nowait(decision)

    async def _tell(self) -> None:
        while not is_cancelled():
            await self._decisions.write(await self._untold.get())
        raise asyncio.CancelledError


def _parsed(texts: dict[str, str]) -> dict[str, Calibration]:
    found = {}
    for name, text in texts.items():
        try:
            found[name] = Calibration.model_validate_json(text)
        except ValidationError as error:
            log.warning("calibration_unreadable", name=name, error=str(error))
    return found
