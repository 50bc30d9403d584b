"""Planner of an instance: chooses drafts in the mode that the knobs select, and follows changes of the knobs.

Mode, margin and latch belong to a whole step: if all of its samples are of one run, that run's knobs apply, else
the knobs shared by all runs. Draft cap, drafters and kill switch apply to each sample by itself.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache

import msgspec
import numpy as np
import structlog
from prometheus_client import CollectorRegistry

from paceline.internal.v1 import policy_pb2 as pb
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
from services.contracts.modes import MODES, PlanReason, RegisteredMode
from services.generation.draft_cache.origin import Origin
from services.generation.speculation.decision import Exploration, Mode, PlanDecision
from services.generation.speculation.drafter import Proposals, ProposalsByName, Samples
from services.generation.speculation.plan import (
    UNBOUNDED,
    DraftableBatch,
    DraftLengths,
    DraftPlanner,
    Drafts,
    FixedLengthPlanner,
    StepShape,
)
from services.generation.speculation.selection import Floats
from services.platform.observability.metrics import MetricSet, counter, gauge, histogram
from services.step_time.estimator import StepTimeEstimator

OriginOf = Callable[[str], Origin | None]
"""Returns the origin of a sample by id; None if it is not of the step that is rolled out."""

_ERROR_BUCKETS = (0.01, 0.02, 0.04, 0.08, 0.12, 0.2, 0.35, 0.5, 1, 2, 5)
_MAX_STEPS, _MAX_SWITCHES = 8, 64
_log = structlog.get_logger(__name__)


class PlannerMetrics(MetricSet, prefix="paceline_planner_"):
    """Decisions and the accuracy of predicted step times. Used by the engine thread only."""

    decisions = counter("steps_total", "Steps planned, by reason.", "reason")
    tokens = counter("tokens_total", "Draft tokens planned.")
    expected = counter("expected_tokens_total", "Draft tokens expected to be accepted.")
    speedup = gauge("predicted_speedup_ratio", "Predicted speedup over plain decoding in the latest step.")
    predicted_seconds = counter("predicted_step_seconds_total", "Predicted time of measured steps.")
    measured_seconds = counter("measured_step_seconds_total", "Measured time of steps with a predicted one.")
    error = histogram("step_time_error_ratio", "Relative error of predicted step times.", _ERROR_BUCKETS)

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        # Finding the counter of a reason takes longer than counting.
        self._by_reason = cache(self.decisions.labels)

    def planned(self, decision: PlanDecision) -> None:
        """Count a decision."""
        self._by_reason(decision.reason).inc()
        if decision.tokens:
            self.tokens.inc(decision.tokens)
            self.expected.inc(decision.expected)
        self.speedup.set(decision.speedup)

    def predicted(self, predicted: float, measured: float) -> None:
        """Count a measured step with its predicted seconds."""
        self.predicted_seconds.inc(predicted)
        self.measured_seconds.inc(measured)
        self.error.observe(abs(predicted - measured) / measured)


class SpeculationAccount:
    """Totals of the latest steps of runs, and the latest switches of the toggle.

    All that is recorded counts for the step that `begin` named last.
    """

    def __init__(self) -> None:
        self._steps: OrderedDict[StepKey, StepTotals] = OrderedDict()
        self._switches: deque[pb.Switch] = deque(maxlen=_MAX_SWITCHES)
        self._serial = 0
        self._key: StepKey | None = None
        # Totals of the present step; of a step that belongs to no run they are not reported.
        self._totals = StepTotals()
        # A step that begins with plain decoding did not switch speculation off.
        self._on = False
        # A drafter had no room for samples of the next engine step.
        self._lacked = False
        # Verifications by (drafted tokens, accepted tokens) that are not in the totals yet, by source.
        self._verified: dict[str, Counter[tuple[int, int]]] = {}

    def begin(self, key: StepKey | None) -> bool:
        """Count for this step of a run, or for none; return True if it differs from the previous one."""
        if key == self._key:
            return False
        self._settle()
        self._key, self._on = key, False
        self._totals = StepTotals() if key is None else self._steps.setdefault(key, StepTotals())
        while len(self._steps) > _MAX_STEPS:
            self._steps.popitem(last=False)
        return True

    def planned(self, decision: PlanDecision, mode: str) -> None:
        """Count the plan of an engine step."""
        totals = self._totals
        totals.reasons[decision.reason] += 1
        totals.planned_tokens += decision.tokens
        totals.expected_tokens += decision.expected
        totals.predicted_gain += decision.speedup - 1.0
        totals.mode = mode
        totals.lacking_steps += self._lacked
        self._lacked = False

    def lacked(self, samples: int) -> None:
        """Record that a drafter had no room for `samples` samples of the engine step that is planned next."""
        self._lacked = samples > 0

    def toggled(self, on: bool, speedup: float, requests: int, now: float) -> None:
        """Record the state of the toggle at Unix time `now`; it is a switch if it changed within the step."""
        if on != self._on and self._key is not None:
            self._serial += 1
            run_id, step = self._key
            switch = pb.Switch(
                serial=self._serial,
                on=on,
                predicted_speedup=speedup,
                requests=requests,
                run_id=run_id,
                step=step,
            )
            switch.time.FromNanoseconds(int(now * 1e9))
            self._switches.append(switch)
        self._on = on

    def timed(self, predicted: float, measured: float) -> None:
        """Add the predicted and the measured seconds of an engine step."""
        self._totals.predicted_seconds += predicted
        self._totals.measured_seconds += measured

    def verified(self, source: str, drafted: int, accepted: int, count: int = 1) -> None:
        """Count drafts with this outcome."""
        counted = self._verified.get(source)
        if counted is None:
            counted = self._verified[source] = Counter()
        counted[drafted, accepted] += count

    def steps(self) -> Iterable[tuple[StepKey, StepTotals]]:
        """Return the latest steps, oldest first."""
        self._settle()
        return self._steps.items()

    def switches(self, after: int) -> list[pb.Switch]:
        """Return the switches with a serial number above `after`."""
        return [each for each in self._switches if each.serial > after]

    def _settle(self) -> None:
        """Add the counted outcomes to the totals; one `Acceptance` per draft and step would take too long."""
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


class ResolvedKnobs:
    """Knobs of a revision: the shared ones, and the ones of single runs; used by the engine thread."""

    def __init__(self, revision: int, shared: Knobs, runs: Mapping[str, Knobs], origin_of: OriginOf) -> None:
        self.revision = revision
        self.shared = shared
        self.runs = runs
        # Knobs of steps with samples of several runs, by whether any of them speculates; the same objects in
        # every step.
        self._mixed = [shared.model_copy(update={"speculation": on}) for on in (False, True)]
        self._origin_of = origin_of
        # Samples of the last query, and the knobs of each.
        self._samples: Samples = ()
        self._of_samples: list[Knobs] = []

    @property
    def window(self) -> int:
        """Largest draft cap of any run."""
        return max(each.draft_cap for each in (self.shared, *self.runs.values()))

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
        if not self.runs:
            return samples
        limits = [knobs.draft_cap if knobs.speculation else 0 for knobs in self._each(samples)]
        pairs = zip(samples, limits, strict=True)
        return [
            sample if sample.room <= limit else msgspec.structs.replace(sample, room=limit)
            for sample, limit in pairs
        ]

    def _common(self, samples: Samples) -> Knobs | None:
        """Return the knobs of all samples, at least one; None if they differ."""
        if not self.runs:
            return self.shared
        first, *others = self._each(samples)
        return first if all(each is first for each in others) else None

    def _each(self, samples: Samples) -> list[Knobs]:
        """Return the knobs of each sample, cached because every drafter asks for the same samples in a step."""
        if self._samples is not samples:
            origins = [self._origin_of(sample.sample_id) for sample in samples]
            self._of_samples = [
                self.shared if each is None else self.runs.get(each.run_id, self.shared) for each in origins
            ]
            self._samples = samples
        return self._of_samples


def _wants(knobs: Knobs, drafter: str) -> bool:
    return knobs.speculation and knobs.drafters.on(drafter)


class KnobDrivenPlanner(DraftPlanner):
    """Planner that works by knobs, for the whole batch and for the samples of each run.

    It keeps one mode object per combination of knobs that a step worked by. Modes share the exploration, because a
    step is measured in whichever mode it was planned. Decisions and outcomes are recorded in the metrics and in
    `account`, an engine step for the run and step of its first sample: batches of a synchronous run have no others.
    """

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
        modes: Mapping[str, RegisteredMode] = MODES,
    ) -> None:
        """Begin at revision 0, with the instance's own configuration.

        Args:
            base: the instance's own configuration.
            step_time: estimator that decisions are based on.
            origin_of: returns the run and step of a sample.
            fixed: has the floors of drafts of fixed length.
            metrics: of decisions and predictions.
            clock: Unix seconds.
            exploration: schedule of explorations, shared by the modes.
            graphs: numbers of verified tokens for which the engine has graphs, rising; steps of these sizes are
                preferred.
            learns: False if measured steps change nothing, because `step_time` is another device's.
            modes: classes of the modes, by name.
        """
        self.account = SpeculationAccount()
        self.base = base
        self.knobs = ResolvedKnobs(0, base, {}, origin_of)
        self.window = base.draft_cap
        self.step_time = step_time
        """Estimator that decisions are based on."""
        self._origin_of = origin_of
        self._fixed = fixed or FixedLengthPlanner(1)
        self._graphs = tuple(graphs)
        self._learns = learns
        self._registered = modes
        self._metrics = metrics
        self._clock = clock
        self._modes: dict[int, Mode] = {}
        self._mode: Mode | None = None
        self._exploration = exploration or Exploration()

    def resolve(
        self, revision: int, shared: Setting, runs: Mapping[str, Setting], caps: Mapping[str, int]
    ) -> ResolvedKnobs:
        """Return resolved knobs; on any thread, because for many runs a step should not wait for it.

        Args:
            revision: of the knobs.
            shared: checked settings over the instance's own configuration.
            runs: settings over those, by run.
            caps: draft caps that the ladders of runs have reached, within their knobs' caps.
        """
        knobs = resolved(self.base, [shared])
        own = {}
        for run_id in {*runs, *caps}:
            # The same object if a run has no own setting, so that its samples share a mode with others.
            own[run_id] = capped(resolved(knobs, [runs[run_id]] if run_id in runs else []), caps.get(run_id))
        return ResolvedKnobs(revision, knobs, own, self._origin_of)

    def apply(self, knobs: ResolvedKnobs) -> int:
        """Work by these knobs from the next step on, unless later ones apply; return the revision that applies."""
        if knobs.revision > self.knobs.revision:
            self.knobs, self.window = knobs, knobs.window
            self._modes.clear()
            shared = knobs.shared.model_dump()
            _log.info("knobs_applied", revision=knobs.revision, knobs=shared, runs=len(knobs.runs))
        return self.knobs.revision

    def wants(self, drafter: str, samples: Samples) -> Sequence[bool] | bool:
        """Return True if a drafter may propose for all samples, False for none, or one value per sample."""
        return self.knobs.wants(drafter, samples)

    def plain_seconds(self, samples: int, context: int) -> float:
        """Return the predicted time of a step without drafts; 0 before anything was measured."""
        return self.step_time.seconds(samples, samples, context) if self.step_time.known else 0.0

    def choose(self, samples: Samples, proposals: ProposalsByName, rows: int = UNBOUNDED) -> Drafts:
        """Return the drafts of the next step; see `DraftPlanner`."""
        mode = self._begin(samples)
        if mode.knobs.speculation:
            drafts = mode.choose(self.knobs.limited(samples), proposals, rows)
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

    def verified(self, source: str, drafted: int, accepted: int, count: int = 1) -> None:
        """Record the outcome of `count` drafts of the last step."""
        self.account.verified(source, drafted, accepted, count)
        if self._mode is not None:
            self._mode.verified(drafted, accepted, count)

    def draft_lengths(
        self,
        drafter: str,
        samples: Samples,
        others: Sequence[Proposals],
        window: int,
        acceptance: Floats,
        pass_time: StepTimeEstimator,
    ) -> DraftLengths:
        """Return how many tokens a draft model should draft for each sample; see `LengthChooser`."""
        batch = DraftableBatch.of(samples, others, window, len(acceptance), self.step_time)
        lengths = self.mode_of(samples).passes(batch, acceptance, pass_time)
        wanted = self.wants(drafter, samples)
        return lengths if wanted is True else replace(lengths, tokens=np.where(wanted, lengths.tokens, 0))

    def mode_of(self, samples: Samples) -> Mode:
        """Return the mode of a step with these samples, at least one."""
        knobs = self.knobs.of_step(samples)
        # By identity, because hashing the knobs takes longer than all else here. The mode keeps them alive.
        mode = self._modes.get(id(knobs))
        if mode is None:
            arguments = (self.step_time, knobs, self._exploration, self._fixed, self._graphs)
            mode = self._modes[id(knobs)] = self._registered[knobs.mode].load()(*arguments)
        return mode

    def _begin(self, samples: Samples) -> Mode:
        """Return the mode of the next step, and count the step for the run of its first sample."""
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
        if mode.SWITCHES and decision.reason in mode.REASONS:
            on = decision.reason.drafted
            self.account.toggled(on, decision.available, requests, self._clock())
        if self._metrics is not None:
            self._metrics.planned(decision)
