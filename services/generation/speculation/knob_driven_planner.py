"""Planner of an instance: chooses drafts in the mode that the knobs select, and follows changes of the knobs.

It keeps one object per combination of knobs that a step worked by, shares exploration among the modes (a step is
measured whatever decided it), and books decisions and outcomes for the reports of the instance.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import structlog

from services.contracts.knobs import Knobs
from services.generation.speculation.account import SpeculationAccount
from services.generation.speculation.active_knobs import ActiveKnobs, OriginOf, PreparedKnobs
from services.generation.speculation.drafter import ProposalsByName, Samples
from services.generation.speculation.exploration import Exploration
from services.generation.speculation.modes.adaptive import AdaptiveMode
from services.generation.speculation.modes.decision import Mode, PlanReason
from services.generation.speculation.modes.fixed import FixedMode
from services.generation.speculation.modes.planner import PlannerMode
from services.generation.speculation.modes.planner_metrics import PlannerMetrics
from services.generation.speculation.modes.solver import SolverMode
from services.generation.speculation.modes.toggle import ToggleMode
from services.generation.speculation.plan import (
    UNBOUNDED,
    DraftPlanner,
    Drafts,
    FixedLengthPlanner,
    StepShape,
)
from services.step_time.estimator import StepTimeEstimator

_log = structlog.get_logger(__name__)
_MODES: dict[str, type[Mode]] = {
    "fixed": FixedMode,
    "toggle": ToggleMode,
    "adaptive": AdaptiveMode,
    "solver": SolverMode,
    "planner": PlannerMode,
}


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
        learns: bool = True,
    ) -> None:
        """Begin with the instance's own configuration, `base`; `fixed` has the floors of drafts of fixed length.

        The planner prefers steps of as many verified tokens as the engine has `graphs` for, rising. Unless it
        `learns`, what steps really take changes nothing: `step_time` is another device's.
        """
        self.account = SpeculationAccount()
        self.active = ActiveKnobs(base, origin_of)
        self.window = base.draft_cap
        self.step_time = step_time
        """Estimator that decisions are based on."""
        self._origin_of = origin_of
        self._fixed = fixed or FixedLengthPlanner(1)
        self._graphs = tuple(graphs)
        self._learns = learns
        self._metrics = metrics
        self._clock = clock
        self._modes: dict[int, Mode] = {}
        self._mode: Mode | None = None
        self._exploration = exploration or Exploration()

    def apply(self, prepared: PreparedKnobs) -> int:
        """Work by these knobs from the next step on, unless later ones are in force; return that revision."""
        if self.active.apply(prepared):
            self.window = self.active.window
            self._modes.clear()
            knobs = prepared.shared.model_dump()
            _log.info("knobs_applied", revision=prepared.revision, knobs=knobs, runs=len(prepared.runs))
        return self.active.revision

    def wants(self, drafter: str, samples: Samples) -> Sequence[bool] | bool:
        """Return True if a drafter may propose for all samples, False for none, or one value per sample."""
        return self.active.wants(drafter, samples)

    def plain_seconds(self, samples: int, context: int) -> float:
        """Return the predicted time of a step without drafts; 0 before anything was measured."""
        return self.step_time.seconds(samples, samples, context) if self.step_time.known else 0.0

    def choose(self, samples: Samples, proposals: ProposalsByName, rows: int = UNBOUNDED) -> Drafts:
        """Return the drafts of the next step; see `DraftPlanner`."""
        mode = self._begin(samples)
        if mode.knobs.speculation:
            drafts = mode.choose(self.active.limited(samples), proposals, rows)
        else:
            drafts = mode.plain(PlanReason.OFF)
        self._record(mode, len(samples))
        return drafts

    def back_off(self, samples: Samples) -> None:
        """Record a step that is not planned because drafting backs off."""
        mode = self._begin(samples)
        mode.plain(PlanReason.BACKOFF)
        self._record(mode, len(samples))

    def stepped(self, shape: StepShape, seconds: float) -> None:
        """Learn the measured time of a step."""
        if not self._learns:
            return
        predicted = self.step_time.observe(shape.requests, shape.rows, shape.context, seconds)
        self.account.timed(predicted, seconds)
        if self._metrics is not None:
            self._metrics.predicted(predicted, seconds)

    def verified(self, source: str, drafted: int, accepted: int) -> None:
        """Record the outcome of one draft of the last step."""
        self.account.verified(source, drafted, accepted)
        if self._mode is not None:
            self._mode.verified(drafted, accepted)

    def mode_of(self, samples: Samples) -> Mode:
        """Return the mode of a step with these samples, at least one."""
        knobs = self.active.of_step(samples)
        # By identity, because hashing the knobs takes longer than all else here. The mode keeps them alive.
        mode = self._modes.get(id(knobs))
        if mode is None:
            given = (self.step_time, knobs, self._exploration, self._fixed, self._graphs)
            mode = self._modes[id(knobs)] = _MODES[knobs.mode](*given)
        return mode

    def _begin(self, samples: Samples) -> Mode:
        """Return the mode of the next step, and book the step for the run of its first sample."""
        origin = self._origin_of(samples[0].sample_id)
        if self.account.begin((origin.run_id, origin.step) if origin is not None else None):
            for mode in self._modes.values():
                mode.new_step()
        self._mode = self.mode_of(samples)
        return self._mode

    def _record(self, mode: Mode, requests: int) -> None:
        decision = mode.last
        self._exploration.record_step(requests, drafted=decision.tokens > 0)
        self.account.planned(decision, mode.knobs.mode)
        if decision.reason in (PlanReason.TOGGLED_ON, PlanReason.TOGGLED_OFF):
            on = decision.reason == PlanReason.TOGGLED_ON
            self.account.toggled(on, decision.available, requests, self._clock())
        if self._metrics is not None:
            self._metrics.planned(decision)
