"""Decisions about the steps of simulated instances, by the planner of services.generation. Deterministic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, log

import numpy as np

from services.contracts.knobs import Knobs
from services.generation.engine.types import EngineSampleState
from services.generation.speculation.decision import Exploration
from services.generation.speculation.drafter import Proposals
from services.generation.speculation.plan import DraftableBatch, StepShape
from services.generation.speculation.planner import KnobDrivenPlanner
from services.simulator.device_tables import DeviceTable, swept
from services.simulator.simulation_setup import Floats, SimulatedSource
from services.step_time.estimator import StepTimeEstimator

# Decisions about a batch; the last one is used.
_SETTLED = 6
# Batches are the same up to these factors: samples of a cohort (few are exact), and context of a sample.
_ALIKE, _ALIKE_CONTEXT, _EXACT = 1.08, 1.2, 16
_SWEPT = 512


@dataclass(frozen=True, slots=True)
class StepDecision:
    """Decision about a step, by cohort: mean new tokens of a sample, and mean drafted tokens.

    A draft model runs `passes` times on `drafted_for` samples.
    """

    tokens: dict[str, float]
    drafted: dict[str, float]
    passes: int = 0
    drafted_for: float = 0.0


class _NoExploration(Exploration):
    """Exploration of an instance that knows its step times."""

    def should_explore(self, num_samples: int, speedup: float, *, drafted: bool) -> bool:
        return False

    def fewer(self, num_samples: int, tokens: int) -> int:
        return tokens


class StepDecider:
    """Decisions on one kind of device.

    The planner has an estimator on a sweep of the device. It decides on a batch with the requested number of
    samples of each cohort, learns the time of the step, and decides again, until it has settled; that decision is
    kept for all batches that are nearly the same, on any instance. Exploration, which an instance needs because it
    does not know its device, is left out, and so is the time that deciding takes.
    """

    def __init__(
        self,
        device: DeviceTable,
        knobs: Knobs,
        sources: Sequence[SimulatedSource],
        pregenerated: SimulatedSource | None = None,
        seed: int = 0,
    ) -> None:
        """Begin with a sweep of the device.

        Args:
            device: step times of the instances.
            knobs: the knobs of all instances.
            sources: that every sample of a step has; at most one of them is a draft model.
            pregenerated: source of pre-generated drafts, which a sample has up to the end of its draft.
            seed: seed of the sweep's noise and of acceptance.
        """
        self.device = device
        self._knobs = knobs
        self._open = tuple(sources)
        self._covered = (*sources, pregenerated) if pregenerated is not None else self._open
        self._models = [each for each in sources if each.passes is not None]
        if len(self._models) > 1:
            raise ValueError("an instance has one draft model at most")
        self._planner = KnobDrivenPlanner(
            knobs,
            StepTimeEstimator(swept(device, _SWEPT, seed)),
            lambda _: None,
            exploration=_NoExploration(),
            graphs=device.graphs,
        )
        self._pass_time = StepTimeEstimator()
        self._random = np.random.default_rng(seed)
        self._known: dict[tuple[object, ...], StepDecision] = {}

    @property
    def speculates(self) -> bool:
        """True if samples have drafts at all."""
        return self._knobs.speculation and bool(self._covered)

    @property
    def most_tokens(self) -> int:
        """Most tokens that a step adds to a sample."""
        return 1 + self._knobs.draft_cap if self.speculates else 1

    def pass_seconds(self, samples: float, context: float) -> float:
        """Return the time of one pass of the draft model for `samples` samples of mean context `context`."""
        table = self._models[0].passes
        assert table is not None
        n = max(1, round(samples))
        return table.seconds(n, n, n * context)

    def decide(self, counts: Mapping[str, int], context: float) -> StepDecision:
        """Return the decision about a batch with `counts` samples by cohort, at least one, of this mean context."""
        if not self.speculates:
            return StepDecision(dict.fromkeys(counts, 1.0), dict.fromkeys(counts, 0.0))
        alike = {kind: _alike(count) for kind, count in counts.items()}
        tokens = ceil(_ALIKE_CONTEXT ** ceil(log(max(context, 1.0), _ALIKE_CONTEXT)))
        key = (tokens, *alike.items())
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._settled(alike, tokens)
        return found

    def _settled(self, counts: Mapping[str, int], context: int) -> StepDecision:
        kinds = [kind for kind, count in counts.items() for _ in range(count)]
        room = self._knobs.draft_cap
        states = [EngineSampleState(f"{i}", [], [], room, context) for i in range(len(kinds))]
        true = self._acceptance(kinds, room)
        for _ in range(_SETTLED):
            proposals, passes, drafted_for = self._proposals(states, true)
            drafts = self._planner.choose(states, proposals, self.device.most_rows) if proposals else None
            lengths = np.zeros(len(kinds), np.int64)
            chosen = [""] * len(kinds)
            for name, made in drafts.tokens.items() if drafts is not None else ():
                lengths[int(name)], chosen[int(name)] = len(made), drafts.origins[name][0] if drafts else ""
            self._teach(states, lengths, chosen, true, context)
        brought = np.ones(len(kinds))
        for i, name in enumerate(chosen):
            if lengths[i]:
                brought[i] += float(np.cumprod(true[name][i, : lengths[i]]).sum())
        if not lengths.any():
            # An instance backs off from drafting if it verifies none of the drafts.
            passes, drafted_for = 0, 0.0
        place = {kind: np.array([each == kind for each in kinds]) for kind in counts}
        return StepDecision(
            {kind: float(brought[here].mean()) for kind, here in place.items()},
            {kind: float(lengths[here].mean()) for kind, here in place.items()},
            passes,
            drafted_for,
        )

    def _acceptance(self, kinds: Sequence[str], width: int) -> dict[str, Floats]:
        """Return the acceptance of each source by sample and position, 0 where it has no draft."""
        found = {}
        for source in self._covered:
            # Pre-generated samples are drafted like the step's own samples.
            has = np.array([source in self._open or kind == "covered" for kind in kinds])
            found[source.name] = has[:, None] * source.by_position(width)
        return found

    def _proposals(
        self, states: Sequence[EngineSampleState], true: Mapping[str, Floats]
    ) -> tuple[dict[str, Proposals], int, float]:
        tokens = np.ones((len(states), self._knobs.draft_cap), np.int32)
        found = {
            each.name: Proposals(tokens, true[each.name])
            for each in self._covered
            if each.passes is None and true[each.name].any()
        }
        if not self._models:
            return found, 0, 0.0
        model, most = self._models[0], self._knobs.draft_cap
        n, context = len(states), sum(each.length for each in states)
        assert model.passes is not None
        self._pass_time.observe(n, n, context, model.passes.seconds(n, n, context))
        batch = DraftableBatch.of(states, list(found.values()), most, most, self._planner.step_time)
        made = self._planner.mode_of(states).passes(batch, model.by_position(most), self._pass_time)
        lengths = made.tokens
        if not lengths.any():
            return found, 0, 0.0
        found[model.name] = Proposals(tokens, true[model.name] * (np.arange(most) < lengths[:, None]))
        return found, int(lengths.max()), float((lengths > 0).sum())

    def _teach(
        self,
        states: Sequence[EngineSampleState],
        lengths: np.ndarray,
        chosen: Sequence[str],
        true: Mapping[str, Floats],
        context: int,
    ) -> None:
        """Report the time of the step and the accepted drafts to the planner."""
        n, rows = len(states), len(states) + int(lengths.sum())
        seconds = self.device.seconds(n, rows, n * context)
        self._planner.stepped(StepShape(n, rows, n * context), seconds)
        for i in np.flatnonzero(lengths).tolist():
            agreed = self._random.random(lengths[i]) < true[chosen[i]][i, : lengths[i]]
            accepted = int(np.argmin(agreed)) if not agreed.all() else int(lengths[i])
            self._planner.verified(chosen[i], int(lengths[i]), accepted)


def _alike(count: int) -> int:
    """Return the number of samples that stands for `count`, no less."""
    if count <= _EXACT:
        return count
    return ceil(_EXACT * _ALIKE ** ceil(log(count / _EXACT, _ALIKE) - 1e-9))
