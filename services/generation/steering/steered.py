"""The plan of an engine, as its knobs have it, and changed between two steps when they change."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import structlog

from services.generation.drafting.plan import UNBOUNDED, Drafts, FixedPlan, StepShape
from services.generation.drafting.planner import NO_SAMPLES, RESTING, Decision, PlanMetrics, PlannedDrafts
from services.generation.drafting.speculation import DraftMetrics
from services.generation.engine.types import SampleState
from services.generation.rollouts.origin import Origin
from services.generation.steering.ledger import Ledger
from services.generation.steering.modes import (
    OFF,
    TOGGLED_OFF,
    TOGGLED_ON,
    FixedDrafts,
    Latched,
    Made,
    Mode,
    SolvedDrafts,
    ToggledDrafts,
)
from services.policy.correction import CorrectedStepTime, Correction
from services.policy.knobs import Knobs, Setting, resolved
from services.policy.step_time import StepTime
from services.policy.timing import Timing
from services.policy.toggle import Toggle
from services.policy.trial import Trial

_log = structlog.get_logger(__name__)
_FITTED_LIMIT = 4.0
_RESTED = Decision(RESTING)

OriginOf = Callable[[str], Origin | None]
"""The origin of a sample by id; None of one that is not of the step that is being rolled out."""


@dataclass(frozen=True, slots=True)
class Floors:
    """Which offers are left out of drafts of fixed length; see `FixedPlan`."""

    first: float = 0.0
    survival: float = 0.0


@dataclass(frozen=True, slots=True)
class Prepared:
    """Knobs of a revision: those that all runs share, those of runs, and a fit of the step time."""

    revision: int
    shared: Knobs
    runs: dict[str, Knobs]
    step_time: StepTime | None = None


class SteeredPlan:
    """A plan (see `speculation.Plan`) by knobs, for the whole batch and for the samples of each run.

    Mode, margin and latch are of a whole step: where all of its samples are of one run they are that run's, else
    those that all runs share. Cap, drafters and kill switch are each sample's own.
    """

    def __init__(
        self,
        base: Knobs,
        step_time: CorrectedStepTime | None,
        origin_of: OriginOf,
        *,
        floors: Floors = Floors(),
        metrics: PlanMetrics | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`base` is the instance's own configuration. Without a step-time model every mode is `fixed`."""
        self.ledger = Ledger()
        self.revision = 0
        self._base = base
        self._step_time = step_time
        self._fitted = ""
        self._origin_of = origin_of
        self._floors = floors
        self._metrics = metrics
        self._clock = clock
        self._shared = base
        self._runs: dict[str, Knobs] = {}
        self._modes: dict[Knobs, Mode] = {}
        self._mode: Mode | None = None
        self._mode_knobs = base
        # Of all modes: whatever decided a step, it was measured.
        self._trial = Trial()
        self._timing = Timing()
        # Whether the step that was chosen last is to be measured.
        self._due = True
        # The samples of the step, and the knobs of each.
        self._asked: Sequence[SampleState] = ()
        self._knobs: list[Knobs] = []
        self._window = base.draft_cap
        # What the last step in which drafters rested went by, and its samples.
        self._rested, self._resting = base, 0

    # Knobs ------------------------------------------------------------------------------------------------

    @property
    def knobs(self) -> Knobs:
        """Those that all runs share."""
        return self._shared

    @property
    def step_time(self) -> CorrectedStepTime | None:
        """The model that decisions rest on."""
        return self._step_time

    def knobs_of(self, run_id: str) -> Knobs:
        """A run's knobs."""
        return self._runs.get(run_id, self._shared)

    def prepared(
        self,
        revision: int,
        shared: Setting,
        runs: Mapping[str, Setting],
        caps: Mapping[str, int],
        step_time: StepTime | None = None,
    ) -> Prepared:
        """Knobs worked out, by any thread: of many runs that takes longer than a step should wait.

        Args:
            revision: of the knobs.
            shared: checked settings over the instance's own configuration.
            runs: settings over those, by run.
            caps: what runs' ladders have reached, within their knobs' caps.
            step_time: a fit for this model, machine and dtype.
        """
        knobs = resolved(self._base, [shared])
        each = {
            run_id: _capped(resolved(knobs, [runs[run_id]] if run_id in runs else []), caps.get(run_id))
            for run_id in {*runs, *caps}
        }
        return Prepared(revision, knobs, each, step_time)

    def apply(self, prepared: Prepared) -> int:
        """Work by these knobs from the next step on, unless later ones are in force; the revision in force."""
        if prepared.revision <= self.revision:
            return self.revision
        self.revision, self._shared, self._runs = prepared.revision, prepared.shared, prepared.runs
        self._window = max(each.draft_cap for each in (self._shared, *self._runs.values()))
        if prepared.step_time is not None:
            self._fit(prepared.step_time)
        self._modes.clear()
        self._mode, self._asked, self._knobs = None, (), []
        knobs = self._shared.model_dump()
        _log.info("knobs_applied", revision=self.revision, knobs=knobs, runs=len(self._runs))
        return self.revision

    def _fit(self, step_time: StepTime) -> None:
        text = step_time.model_dump_json()
        if self._step_time is None or text == self._fitted:
            return
        if step_time.architecture != self._step_time.model.architecture:
            _log.warning("calibration_of_another_model")
            return
        # What measured steps had corrected was the other model.
        self._step_time, self._fitted = CorrectedStepTime(step_time, Correction(_FITTED_LIMIT)), text

    # As a plan --------------------------------------------------------------------------------------------

    @property
    def window(self) -> int:
        """Most tokens of an offer."""
        return self._window

    @property
    def measures(self) -> bool:
        """Whether `stepped` wants to know of the step that was chosen last."""
        return self._step_time is not None and self._shared.speculation and self._due

    def wanted(self, drafter: str, samples: Sequence[SampleState]) -> Sequence[bool] | bool:
        """Whether a drafter is to make offers (see `Gated`)."""
        if not self._runs:
            return self._wants(self._shared, drafter)
        each = self._each(samples)
        if all(knobs is each[0] for knobs in each):
            return self._wants(each[0], drafter) if each else False
        return [self._wants(knobs, drafter) for knobs in each]

    def stepped(self, shape: StepShape, seconds: float) -> None:
        """A step of this shape took so long."""
        if self._step_time is None:
            return
        mode = self._mode.planner if isinstance(self._mode, Latched) else self._mode
        if isinstance(mode, PlannedDrafts):
            # It has predicted the step already, and tells `predicted`.
            mode.stepped(shape, seconds)
        else:
            self.predicted(
                self._step_time.observe(shape.requests, shape.rows, shape.context, seconds), seconds
            )

    def planned(self, decision: Decision) -> None:
        """See `PlanMetrics`: a planner's decision is counted with those of all modes."""

    def predicted(self, predicted: float, measured: float) -> None:
        """See `PlanMetrics`."""
        self.ledger.timed(predicted, measured)
        if self._metrics is not None:
            self._metrics.predicted(predicted, measured)

    def rest(self, samples: Sequence[SampleState]) -> None:
        """A step is not planned: drafters rest."""
        self._rested, self._resting = self._step_knobs(samples), len(samples)
        self.rest_on()

    def rest_on(self) -> None:
        """Nor is the one after it, of the same samples."""
        self._decided(_RESTED, self._rested, self._resting)
        self._timing.passed(drafted=False)

    def choose(self, samples: Sequence[SampleState], offers: Made, rows: int = UNBOUNDED) -> Drafts:
        """The drafts of a step.

        Args:
            samples: the samples that can verify a draft.
            offers: of each drafter that makes any.
            rows: that these samples and their draft tokens may have together, at most.
        """
        if not samples:
            return Drafts()
        knobs = self._step_knobs(samples)
        if not knobs.speculation:
            self._decided(Decision(OFF), knobs, len(samples))
            return Drafts()
        mode = self._mode_for(knobs)
        states = samples if not self._runs else self._limited(samples)
        drafts = mode.choose(states, offers, rows)
        self._decided(mode.last, knobs, len(samples))
        self._due = self._timing.due(mode.last.seconds, drafted=mode.last.tokens > 0)
        return drafts

    def verified(self, source: str, drafted: int, accepted: int) -> None:
        """A draft of the last step was verified."""
        self.ledger.verified(source, drafted, accepted)
        if isinstance(self._mode, SolvedDrafts):
            self._mode.verified(drafted, accepted)

    def _step_knobs(self, samples: Sequence[SampleState]) -> Knobs:
        """What the whole step goes by; the ledger is told whose step it is."""
        origin = self._origin_of(samples[0].sample_id)
        if self.ledger.begin((origin.run_id, origin.step) if origin is not None else None):
            for mode in self._modes.values():
                if isinstance(mode, SolvedDrafts):
                    mode.new_step()
        if not self._runs:
            return self._shared
        each = self._each(samples)
        if all(knobs is each[0] for knobs in each):
            return each[0]
        # Off where all are off; else the shared ones, and the samples' own limits.
        on = any(knobs.speculation for knobs in each)
        return (
            self._shared
            if on == self._shared.speculation
            else self._shared.model_copy(update={"speculation": on})
        )

    def _decided(self, decision: Decision, knobs: Knobs, requests: int) -> None:
        if decision.reason == NO_SAMPLES:
            return
        self._trial.stepped(requests, drafted=decision.tokens > 0)
        self.ledger.planned(decision, knobs.mode)
        if decision.reason in (TOGGLED_ON, TOGGLED_OFF):
            on = decision.reason == TOGGLED_ON
            self.ledger.switched(on, decision.offered, requests, self._clock())
        if self._metrics is not None:
            self._metrics.planned(decision)

    def _mode_for(self, knobs: Knobs) -> Mode:
        # The same object, step after step: to ask for its hash takes longer than all else here.
        if self._mode is not None and self._mode_knobs is knobs:
            return self._mode
        mode = self._modes.get(knobs)
        if mode is None:
            mode = self._modes[knobs] = self._made(knobs)
        self._mode, self._mode_knobs = mode, knobs
        return mode

    def _made(self, knobs: Knobs) -> Mode:
        fixed = FixedPlan(knobs.draft_cap, self._floors.first, self._floors.survival)
        if self._step_time is None or knobs.mode == "fixed":
            return FixedDrafts(fixed, self._step_time)
        if knobs.mode == "toggle":
            return ToggledDrafts(fixed, self._step_time, Toggle(knobs.margin, knobs.latch), self._trial)
        if knobs.mode == "solver":
            return SolvedDrafts(fixed, self._step_time, knobs.margin)
        planned = PlannedDrafts(knobs.draft_cap, self._step_time, knobs.margin, self, trial=self._trial)
        return Latched(planned, knobs.margin) if knobs.latch else planned

    def _limited(self, samples: Sequence[SampleState]) -> list[SampleState]:
        """The samples with room for as many tokens as their knobs allow."""
        states = []
        for sample, knobs in zip(samples, self._each(samples), strict=True):
            limit = knobs.draft_cap if knobs.speculation else 0
            states.append(sample if sample.room <= limit else replace(sample, room=limit))
        return states

    def _each(self, samples: Sequence[SampleState]) -> list[Knobs]:
        """The knobs of each sample; all drafters and the choice ask for the same ones in a step."""
        if self._asked is not samples:
            origins = [self._origin_of(sample.sample_id) for sample in samples]
            self._knobs = [self._shared if each is None else self.knobs_of(each.run_id) for each in origins]
            self._asked = samples
        return self._knobs

    @staticmethod
    def _wants(knobs: Knobs, drafter: str) -> bool:
        # A drafter that there is no knob for is wanted.
        return knobs.speculation and getattr(knobs.drafters, drafter, True)


@dataclass(frozen=True, slots=True)
class Counted:
    """Draft metrics that the plan hears of as well."""

    metrics: DraftMetrics
    plan: SteeredPlan

    def verified(self, drafter: str, drafted: int, accepted: int) -> None:
        """See `DraftMetrics`."""
        self.metrics.verified(drafter, drafted, accepted)
        self.plan.verified(drafter, drafted, accepted)

    def fault(self, drafter: str) -> None:
        """See `DraftMetrics`."""
        self.metrics.fault(drafter)


def _capped(knobs: Knobs, cap: int | None) -> Knobs:
    if cap is None or cap >= knobs.draft_cap:
        return knobs
    return knobs.model_copy(update={"draft_cap": max(1, cap)})
