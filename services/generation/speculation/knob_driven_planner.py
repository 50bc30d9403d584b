"""Planner of an instance: chooses drafts in the mode that the knobs select, and follows changes of the knobs.

It keeps one object per combination of knobs that a step worked by, shares exploration among the modes (a step is
measured whatever decided it), and books decisions and outcomes for the reports of the instance.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import structlog
from numpy.typing import NDArray

from services.contracts.knobs import Knobs
from services.generation.engine.types import EngineSampleState
from services.generation.speculation.account import SpeculationAccount
from services.generation.speculation.active_knobs import ActiveKnobs, OriginOf, PreparedKnobs
from services.generation.speculation.draft_lengths import DraftableBatch, DraftLengths
from services.generation.speculation.drafter import Proposals
from services.generation.speculation.exploration import Exploration
from services.generation.speculation.modes.adaptive import AdaptiveMode
from services.generation.speculation.modes.decision import Mode, PlanDecision, PlanReason
from services.generation.speculation.modes.fixed import FixedMode
from services.generation.speculation.modes.planner import PlannerMode
from services.generation.speculation.modes.planner_metrics import PlannerMetrics
from services.generation.speculation.modes.solver import SolverMode
from services.generation.speculation.modes.toggle import Latch, ToggleMode
from services.generation.speculation.plan import (
    UNBOUNDED,
    DraftPlanner,
    Drafts,
    FixedLengthPlanner,
    StepShape,
)
from services.step_time.estimator import StepTimeEstimator

_log = structlog.get_logger(__name__)
# Steps at the start that are all measured, and seconds of decoding for each measurement after them: consecutive
# short steps take about as long as each other, and learning from one takes some hundredths of a millisecond.
_ALWAYS, _INTERVAL = 64, 0.005


class KnobDrivenPlanner(DraftPlanner):
    """Planner by knobs, for the whole batch and for the samples of each run (see `active_knobs`)."""

    def __init__(
        self,
        base: Knobs,
        step_time: StepTimeEstimator,
        origin_of: OriginOf,
        *,
        fixed: FixedLengthPlanner | None = None,
        metrics: PlannerMetrics | None = None,
        clock: Callable[[], float] = time.time,
        exploration: Exploration | None = None,
        graphs: Sequence[int] = (),
    ) -> None:
        """Begin with the instance's own configuration, `base`; `fixed` has the floors of drafts of fixed length.

        The planner prefers steps of as many verified tokens as the engine has `graphs` for, rising.
        """
        self.account = SpeculationAccount()
        self.active = ActiveKnobs(base, origin_of)
        self.window = base.draft_cap
        self.step_time = step_time
        """Estimator that decisions are based on."""
        self._origin_of = origin_of
        self._fixed = fixed or FixedLengthPlanner(1)
        self._graphs = tuple(graphs)
        self._metrics = metrics
        self._clock = clock
        self._modes: dict[Knobs, Mode] = {}
        self._mode: Mode | None = None
        self._mode_knobs = base
        self._exploration = exploration or Exploration()
        # The step that was chosen last is to be measured; how many were, and predicted seconds since the last.
        self._measure, self._measured, self._unmeasured = True, 0, 0.0

    @property
    def knobs(self) -> Knobs:
        """Knobs shared by all runs."""
        return self.active.shared

    @property
    def measures(self) -> bool:
        """True if `stepped` wants the time of the step that was chosen last."""
        return self.knobs.speculation and self._measure

    def apply(self, prepared: PreparedKnobs) -> int:
        """Work by these knobs from the next step on, unless later ones are in force; return that revision."""
        if not self.active.apply(prepared):
            return self.active.revision
        self.window = self.active.window
        self._modes.clear()
        self._mode = None
        knobs = self.knobs.model_dump()
        _log.info("knobs_applied", revision=self.active.revision, knobs=knobs, runs=len(prepared.runs))
        return self.active.revision

    def wants(self, drafter: str, samples: Sequence[EngineSampleState]) -> Sequence[bool] | bool:
        """Return True if a drafter may propose for all samples, False for none, or one value per sample."""
        return self.active.wants(drafter, samples)

    def choose(
        self, samples: Sequence[EngineSampleState], proposals: Mapping[str, Proposals], rows: int = UNBOUNDED
    ) -> Drafts:
        """Return the drafts of the next step; see `DraftPlanner`."""
        if not samples:
            return Drafts()
        knobs = self._knobs_of_step(samples)
        if not knobs.speculation:
            self._record(PlanDecision(PlanReason.OFF), knobs, len(samples))
            return Drafts()
        mode = self._mode_for(knobs)
        drafts = mode.choose(self.active.limited(samples), proposals, rows)
        self._record(mode.last, knobs, len(samples))
        self._unmeasured += mode.last.seconds or _INTERVAL
        self._measure = self._measured < _ALWAYS or self._unmeasured >= _INTERVAL
        if self._measure:
            self._measured, self._unmeasured = self._measured + 1, 0.0
        return drafts

    def back_off(self, samples: Sequence[EngineSampleState]) -> None:
        """Record a step that is not planned because drafting backs off."""
        self._record(PlanDecision(PlanReason.BACKOFF), self._knobs_of_step(samples), len(samples))

    def stepped(self, shape: StepShape, seconds: float) -> None:
        """Learn the measured time of a step."""
        predicted = self.step_time.observe(shape.requests, shape.rows, shape.context, seconds)
        self.account.timed(predicted, seconds)
        if self._metrics is not None:
            self._metrics.predicted(predicted, seconds)

    def verified(self, source: str, drafted: int, accepted: int) -> None:
        """Record the outcome of one draft of the last step."""
        self.account.verified(source, drafted, accepted)
        if self._mode is not None:
            self._mode.verified(drafted, accepted)

    def passes(
        self,
        samples: Sequence[EngineSampleState],
        batch: DraftableBatch,
        acceptance: NDArray[np.float64],
        pass_time: StepTimeEstimator,
    ) -> DraftLengths:
        """Return how many tokens a draft model should draft for each of the samples; see `Mode.passes`."""
        return self._mode_for(self.active.of_step(samples)).passes(batch, acceptance, pass_time)

    def _knobs_of_step(self, samples: Sequence[EngineSampleState]) -> Knobs:
        """Return the knobs of the whole step, and book it for the step of the run of its first sample."""
        origin = self._origin_of(samples[0].sample_id)
        if self.account.begin((origin.run_id, origin.step) if origin is not None else None):
            for mode in self._modes.values():
                mode.new_step()
        return self.active.of_step(samples)

    def _record(self, decision: PlanDecision, knobs: Knobs, requests: int) -> None:
        self._exploration.record_step(requests, drafted=decision.tokens > 0)
        self.account.planned(decision, knobs.mode)
        if decision.reason in (PlanReason.TOGGLED_ON, PlanReason.TOGGLED_OFF):
            on = decision.reason == PlanReason.TOGGLED_ON
            self.account.toggled(on, decision.available, requests, self._clock())
        if self._metrics is not None:
            self._metrics.planned(decision)

    def _mode_for(self, knobs: Knobs) -> Mode:
        # Compared by identity first: hashing the knobs takes longer than all else here.
        if self._mode is not None and self._mode_knobs is knobs:
            return self._mode
        mode = self._modes.get(knobs)
        if mode is None:
            mode = self._modes[knobs] = self._make_mode(knobs)
        self._mode, self._mode_knobs = mode, knobs
        return mode

    def _make_mode(self, knobs: Knobs) -> Mode:
        fixed = replace(self._fixed, window=knobs.draft_cap)
        common = (self.step_time, knobs.margin, self._exploration)
        latch = Latch(knobs.margin, knobs.latch)
        if knobs.mode == "fixed":
            return FixedMode(*common, fixed)
        if knobs.mode == "toggle":
            return ToggleMode(*common, fixed, latch)
        if knobs.mode == "adaptive":
            return AdaptiveMode(*common, fixed, knobs.ladder.lengths)
        if knobs.mode == "solver":
            return SolverMode(*common, fixed)
        return PlannerMode(*common, knobs.draft_cap, latch, self._graphs)
