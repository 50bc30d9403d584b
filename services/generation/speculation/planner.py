"""Planner of an instance: chooses drafts in the mode that the knobs select, and follows changes of the knobs.

`ActiveKnobs` holds the knobs in force. Mode, margin and latch belong to a whole step: if all of its samples are
of one run, that run's knobs apply, else the knobs shared by all runs. Draft cap, drafters and kill switch apply
to each sample by itself.

`KnobDrivenPlanner` keeps one object per combination of knobs that a step worked by, shares exploration among the
modes (a step is measured whatever decided it), and books decisions and outcomes in the metrics and in
`SpeculationAccount`. An engine step is booked for the run and step of its first sample; batches of a synchronous
run have no others.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import structlog

from services.contracts.knobs import (
    MOST_COUNTED,
    Acceptance,
    Knobs,
    Setting,
    StepKey,
    StepTotals,
    capped,
    resolved,
)
from services.contracts.plan_reasons import PlanReason
from services.generation.draft_cache.origin import Origin
from services.generation.speculation.decision import Exploration, Mode, PlanDecision
from services.generation.speculation.drafter import ProposalsByName, Samples
from services.generation.speculation.modes import AdaptiveMode, FixedMode, PlannerMode, SolverMode, ToggleMode
from services.generation.speculation.plan import (
    UNBOUNDED,
    DraftPlanner,
    Drafts,
    FixedLengthPlanner,
    StepShape,
)
from services.platform.observability.metric_set import MetricSet, counter, gauge, histogram
from services.step_time.estimator import StepTimeEstimator

_ERROR_BUCKETS = (0.01, 0.02, 0.04, 0.08, 0.12, 0.2, 0.35, 0.5, 1, 2, 5)


class PlannerMetrics(MetricSet, prefix="paceline_planner_"):
    """Decisions and the accuracy of predicted step times. Used by the engine thread only."""

    decisions = counter("steps_total", "Steps planned, by reason.", "reason")
    tokens = counter("tokens_total", "Draft tokens planned.")
    expected = counter("expected_tokens_total", "Draft tokens expected to be accepted.")
    speedup = gauge(
        "predicted_speedup_ratio", "Predicted tokens per second over plain decoding, of the latest step."
    )
    predicted_seconds = counter(
        "predicted_step_seconds_total", "Predicted time of the steps that were measured."
    )
    measured_seconds = counter("measured_step_seconds_total", "Measured time of the same steps.")
    error = histogram(
        "step_time_error_ratio",
        "Error of a predicted step time, relative to the measured one.",
        _ERROR_BUCKETS,
    )

    def planned(self, decision: PlanDecision) -> None:
        """Count a decision."""
        self.decisions.labels(decision.reason).inc()
        if decision.tokens:
            self.tokens.inc(decision.tokens)
            self.expected.inc(decision.expected)
        self.speedup.set(decision.speedup)

    def predicted(self, predicted: float, measured: float) -> None:
        """Count a measured step with its predicted seconds."""
        self.predicted_seconds.inc(predicted)
        self.measured_seconds.inc(measured)
        self.error.observe(abs(predicted - measured) / measured)


_MAX_STEPS, _MAX_SWITCHES = 8, 64


@dataclass(frozen=True, slots=True)
class SpeculationSwitch:
    """Switch of the toggle within a step; `time` is in Unix seconds, `serial` counts switches."""

    serial: int
    time: float
    on: bool
    speedup: float
    requests: int
    run_id: str
    step: int


class SpeculationAccount:
    """Totals of the latest steps, and the latest switches of the toggle. `begin` says which step is booked for."""

    def __init__(self) -> None:
        self._steps: OrderedDict[StepKey, StepTotals] = OrderedDict()
        self._switches: deque[SpeculationSwitch] = deque(maxlen=_MAX_SWITCHES)
        self._serial = 0
        self._key: StepKey | None = None
        # What is of no step of a run is booked on an account that nobody sees.
        self._totals = StepTotals()
        # A step that begins with plain decoding did not switch speculation off.
        self._on = False
        # By source, verifications by (drafted tokens, accepted tokens) not booked yet.
        self._verified: dict[str, Counter[tuple[int, int]]] = {}

    def begin(self, key: StepKey | None) -> bool:
        """Book what follows for this step of a run, or for none; return True if it is another than before."""
        if key == self._key:
            return False
        self._settle()
        self._key, self._on = key, False
        self._totals = StepTotals() if key is None else self._steps.setdefault(key, StepTotals())
        while len(self._steps) > _MAX_STEPS:
            self._steps.popitem(last=False)
        return True

    def planned(self, decision: PlanDecision, mode: str) -> None:
        """Book the plan of an engine step."""
        totals = self._totals
        totals.reasons[decision.reason] += 1
        totals.planned_tokens += decision.tokens
        totals.expected_tokens += decision.expected
        totals.predicted_gain += decision.speedup - 1.0
        totals.mode = mode

    def toggled(self, on: bool, speedup: float, requests: int, now: float) -> None:
        """Book the state of the toggle; it is a switch if it changed within the step."""
        if on != self._on and self._key is not None:
            self._serial += 1
            self._switches.append(SpeculationSwitch(self._serial, now, on, speedup, requests, *self._key))
        self._on = on

    def timed(self, predicted: float, measured: float) -> None:
        """Book predicted and measured seconds of an engine step."""
        self._totals.predicted_seconds += predicted
        self._totals.measured_seconds += measured

    def verified(self, source: str, drafted: int, accepted: int) -> None:
        """Book the outcome of one draft."""
        counted = self._verified.get(source)
        if counted is None:
            counted = self._verified[source] = Counter()
        counted[drafted, accepted] += 1

    def steps(self) -> Iterable[tuple[StepKey, StepTotals]]:
        """Return the latest steps, oldest first."""
        self._settle()
        return self._steps.items()

    def switches(self, after: int) -> list[SpeculationSwitch]:
        """Return the switches with a serial number above `after`."""
        return [each for each in self._switches if each.serial > after]

    def _settle(self) -> None:
        """Book the counted outcomes: there is no time to build an `Acceptance` for each draft of each step."""
        drafts = self._totals.drafts
        for source, counted in self._verified.items():
            drafts[source] = drafts.get(source, Acceptance()) + _acceptance(counted)
        self._verified.clear()


def _acceptance(counted: Counter[tuple[int, int]]) -> Acceptance:
    drafted, accepted = [0] * (MOST_COUNTED + 1), [0] * (MOST_COUNTED + 1)
    for (proposed, kept), count in counted.items():
        drafted[min(proposed, MOST_COUNTED)] += count
        accepted[min(kept, MOST_COUNTED)] += count
    return Acceptance(
        counted.total(),
        sum(proposed * count for (proposed, _), count in counted.items()),
        sum(kept * count for (_, kept), count in counted.items()),
        tuple(drafted),
        tuple(accepted),
    )


OriginOf = Callable[[str], Origin | None]
"""Returns the origin of a sample by id; None if it is not of the step that is rolled out."""


@dataclass(frozen=True, slots=True)
class PreparedKnobs:
    """Resolved knobs of a revision: those shared by all runs, and those of runs."""

    revision: int
    shared: Knobs
    runs: dict[str, Knobs]


class ActiveKnobs:
    """Knobs by which the next step works; used by the engine thread, except `prepare`."""

    def __init__(self, base: Knobs, origin_of: OriginOf) -> None:
        """Begin with `base`, the instance's own configuration, at revision 0."""
        self.revision = 0
        self._share(base)
        self.base = base
        self._origin_of = origin_of
        self._runs: dict[str, Knobs] = {}
        # Samples of the last query, and the knobs of each.
        self._samples: Samples = ()
        self._of_samples: list[Knobs] = []

    def prepare(
        self, revision: int, shared: Setting, runs: Mapping[str, Setting], caps: Mapping[str, int]
    ) -> PreparedKnobs:
        """Return knobs resolved, on any thread: for many runs that takes longer than a step should wait.

        Args:
            revision: of the knobs.
            shared: checked settings over the instance's own configuration.
            runs: settings over those, by run.
            caps: draft caps that the ladders of runs have reached, within their knobs' caps.
        """
        knobs = resolved(self.base, [shared])
        own = {}
        for run_id in {*runs, *caps}:
            # The same object where nothing is its own, so that its samples share a mode with others.
            own[run_id] = capped(resolved(knobs, [runs[run_id]] if run_id in runs else []), caps.get(run_id))
        return PreparedKnobs(revision, knobs, own)

    def apply(self, prepared: PreparedKnobs) -> bool:
        """Put knobs in force; return False if later ones are in force already."""
        if prepared.revision <= self.revision:
            return False
        self.revision, self._runs = prepared.revision, prepared.runs
        self._share(prepared.shared)
        self._samples, self._of_samples = (), []
        return True

    @property
    def window(self) -> int:
        """Largest draft cap of any run."""
        return max(each.draft_cap for each in (self.shared, *self._runs.values()))

    def wants(self, drafter: str, samples: Samples) -> Sequence[bool] | bool:
        """Return True if a drafter may propose for all samples, False for none, or one value per sample."""
        knobs = self._common(samples)
        return _wants(knobs, drafter) if knobs else [_wants(each, drafter) for each in self._each(samples)]

    def of_step(self, samples: Samples) -> Knobs:
        """Return the knobs of a whole step with these samples, at least one."""
        # Speculation is off if it is off for all samples; else samples keep their own limits.
        return self._common(samples) or self._mixed[any(each.speculation for each in self._each(samples))]

    def limited(self, samples: Samples) -> Samples:
        """Return the samples with room for as many draft tokens as their own knobs allow."""
        if not self._runs:
            return samples
        limits = [knobs.draft_cap if knobs.speculation else 0 for knobs in self._each(samples)]
        pairs = zip(samples, limits, strict=True)
        return [sample if sample.room <= limit else replace(sample, room=limit) for sample, limit in pairs]

    def _share(self, knobs: Knobs) -> None:
        self.shared = knobs
        # Of steps of several runs, by whether any of them speculates; the same objects in every step.
        self._mixed = [knobs.model_copy(update={"speculation": on}) for on in (False, True)]

    def _common(self, samples: Samples) -> Knobs | None:
        """Return the knobs of all samples, at least one; None if they differ."""
        if not self._runs:
            return self.shared
        first, *others = self._each(samples)
        return first if all(each is first for each in others) else None

    def _each(self, samples: Samples) -> list[Knobs]:
        """Return the knobs of each sample, cached because every drafter asks for the same samples in a step."""
        if self._samples is not samples:
            origins = [self._origin_of(sample.sample_id) for sample in samples]
            self._of_samples = [
                self.shared if each is None else self._runs.get(each.run_id, self.shared) for each in origins
            ]
            self._samples = samples
        return self._of_samples


def _wants(knobs: Knobs, drafter: str) -> bool:
    # Drafters without a knob are always on.
    return knobs.speculation and getattr(knobs.drafters, drafter, True)


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
