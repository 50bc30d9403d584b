"""Speculation of an engine: queries the drafters, applies the plan, and reports what was accepted.

Drafters are not trusted. A drafter that raises, answers for the wrong number of samples, or proposes tokens
outside the vocabulary, more tokens than the window, or predictions that are no probabilities, is left out of that
step; the fault is counted and logged once, and after `MAX_FAULTS` faulty steps the drafter is switched off. The
planner is not trusted either: where it raises, or plans what the samples have no room for, the step decodes
plainly, and the fault is counted for the drafter `planner` and logged once. No fault can reach a request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import isnan
from typing import Protocol, TypeVar

import structlog

from services.generation.engine.types import EngineSampleState, SampleStep
from services.generation.speculation.backoff import DraftBackoff
from services.generation.speculation.drafter import (
    DraftContext,
    MigratableDrafter,
    NewRollouts,
    Proposals,
    SequentialDrafter,
    TokenDrafter,
)
from services.generation.speculation.plan import UNBOUNDED, DraftPlanner, Drafts, StepShape, context_of
from services.generation.speculation.selection.selection import flaw

MAX_FAULTS = 3
PLANNER = "planner"
"""Name under which faults of the planner are counted."""
T = TypeVar("T")
_log = structlog.get_logger(__name__)


class VerificationMetrics(Protocol):
    """Counters of drafts and faults, by drafter or source."""

    def verified(self, drafter: str, drafted: int, accepted: int) -> None: ...
    def fault(self, drafter: str) -> None: ...


@dataclass(slots=True)
class _QueriedDrafter:
    """A drafter and its faults."""

    drafter: TokenDrafter
    faults: int = 0
    on: bool = True
    # Faulty in the step being planned: a step counts once, however many samples were affected.
    faulty: bool = False
    # The drafter, if it is queried after the others.
    sequential: SequentialDrafter | None = field(init=False)

    def __post_init__(self) -> None:
        self.sequential = self.drafter if isinstance(self.drafter, SequentialDrafter) else None


@dataclass(slots=True)
class Speculation:
    """The drafters of one engine and their planner. Used by the engine thread only."""

    drafters: Sequence[TokenDrafter]
    plan: DraftPlanner
    vocab_size: int
    metrics: VerificationMetrics
    clock: Callable[[], float] = time.perf_counter
    """Seconds."""
    _queried: list[_QueriedDrafter] = field(init=False)
    _by_name: dict[str, _QueriedDrafter] = field(init=False)
    _drafts: Drafts = field(init=False, default_factory=Drafts)
    _backoff: DraftBackoff = field(init=False, default_factory=DraftBackoff)
    # Drafting is skipped in the step being planned.
    _skipped: bool = field(init=False, default=False)
    # The planner failed before.
    _planner_failed: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        queried = [_QueriedDrafter(drafter) for drafter in self.drafters]
        # Sequential drafters come last.
        self._queried = sorted(queried, key=lambda each: each.sequential is not None)
        self._by_name = {each.drafter.name: each for each in self._queried}

    def begin(self, context: DraftContext) -> None:
        """Register a sample that enters the engine."""
        if len(context.reference):
            self._backoff.draft_next()
        for each in self._active():
            self._guard(each, partial(each.drafter.begin, context))

    def carry(self, sample_id: str) -> dict[str, bytes]:
        """Return the drafters' state of a sample beyond its tokens, by drafter, for another engine."""
        found: dict[str, bytes] = {}
        for each in self._active():
            drafter = each.drafter
            if isinstance(drafter, MigratableDrafter):
                state = self._guard(each, partial(drafter.carry, sample_id))
                if state:
                    found[drafter.name] = state
        return found

    def add_rollouts(self, arrival: NewRollouts) -> None:
        """Pass new rollouts to the drafters."""
        self._backoff.reset()
        for each in self._active():
            self._guard(each, partial(each.drafter.add_rollouts, arrival))

    def idle_work(self) -> bool:
        """Do a slice of the drafters' deferred work while the engine idles; return True if there is more."""
        return any([self._guard(each, each.drafter.idle_work) for each in self._active()])

    def end(self, sample_id: str, response: Sequence[int] = ()) -> None:
        """Release a sample that left the engine, with its response if known."""
        self._drafts.origins.pop(sample_id, None)
        for each in self._active():
            self._guard(each, partial(each.drafter.end, sample_id, response))

    def drafts(self, samples: Sequence[EngineSampleState], rows: int = UNBOUNDED) -> dict[str, list[int]]:
        """Return the tokens to verify in the next step, by sample id; see `DraftPlanner.choose`."""
        if not samples:
            self._drafts = Drafts()
            return {}
        self._skipped = not self._backoff.should_draft(len(samples))
        if self._skipped:
            self._planned(partial(self.plan.back_off, samples), None)
            self._drafts = Drafts()
            return {}
        began = self.clock()
        proposals: dict[str, Proposals] = {}
        for each in self._active():
            made = self._query(each, samples, proposals)
            if made is not None:
                proposals[each.drafter.name] = made
        self._drafts = self._planned(partial(self._choose, samples, proposals, rows), Drafts())
        saved = self._drafts.saved if self._drafts.tokens else 0.0
        self._backoff.record_drafted_step(len(samples), saved, self.clock() - began)
        return dict(self._drafts.tokens)

    def shape(
        self, samples: Sequence[EngineSampleState], drafts: Mapping[str, Sequence[int]]
    ) -> StepShape | None:
        """Return the shape of the next step if its time should be measured, else None.

        Steps that skip drafting are not measured: the others teach the step-time model enough.
        """
        if self._skipped or not samples or not self._planned(lambda: self.plan.measures, False):
            return None
        rows = len(samples) + sum(map(len, drafts.values()))
        return StepShape(len(samples), rows, context_of(samples))

    def stepped(self, shape: StepShape, seconds: float) -> None:
        """Report the measured time of a step of this shape; it may come some steps late."""
        self._planned(partial(self.plan.stepped, shape, seconds), None)

    def drafter_of(self, sample_id: str) -> str:
        """Return the origin, in results, of the tokens that the last step verified for a sample; "" for none."""
        origin = self._drafts.origins.get(sample_id)
        return "" if origin is None else origin[1]

    def learn(self, step: SampleStep) -> None:
        """Report a sample's verification to the drafter that made its draft."""
        origin = self._drafts.origins.get(step.sample_id)
        if origin is None or not step.drafted:
            return
        drafter, source = origin
        self.metrics.verified(source, step.drafted, step.accepted)
        # Not through `_planned`: this runs for every sample of every step.
        try:
            self.plan.verified(source, step.drafted, step.accepted)
        except Exception as error:
            self._planner_fault(repr(error))
        each = self._by_name[drafter]
        if not each.on:
            return
        try:
            each.drafter.learn(step.sample_id, step.drafted, step.accepted)
        except Exception as error:
            self._fault(each, repr(error))

    def _active(self) -> list[_QueriedDrafter]:
        return [each for each in self._queried if each.on]

    def _planned(self, call: Callable[[], T], otherwise: T) -> T:
        """Return what the planner says, or `otherwise` if it fails."""
        try:
            return call()
        except Exception as error:
            self._planner_fault(repr(error))
            return otherwise

    def _planner_fault(self, what: str) -> None:
        self.metrics.fault(PLANNER)
        if not self._planner_failed:
            _log.error("planner_fault", fault=what, consequence="its steps decode plainly")
        self._planner_failed = True

    def _choose(
        self, samples: Sequence[EngineSampleState], proposals: Mapping[str, Proposals], rows: int
    ) -> Drafts:
        """Return the planner's drafts of the next step; ValueError where the samples have no room for them."""
        made = self.plan.choose(samples, proposals, rows)
        rooms = {sample.sample_id: sample.room for sample in samples} if made.tokens else {}
        for sample_id, tokens in made.tokens.items():
            if not 0 < len(tokens) <= rooms.get(sample_id, 0) or made.origins[sample_id][0] not in proposals:
                raise ValueError(f"{len(tokens)} draft tokens, room for {rooms.get(sample_id, 0)}")
        if isnan(made.saved):
            raise ValueError("drafts with a gain that is no number")
        if made.tokens and len(samples) + made.count > rows:
            raise ValueError(f"{made.count} draft tokens for {len(samples)} samples in {rows} rows")
        return made

    def _query(
        self, each: _QueriedDrafter, samples: Sequence[EngineSampleState], others: Mapping[str, Proposals]
    ) -> Proposals | None:
        each.faulty = False
        try:
            window = self.plan.window
            wanted = self.plan.wants(each.drafter.name, samples)
        except Exception as error:
            self._planner_fault(repr(error))
            return None
        try:
            made = self._propose(each, samples, window, wanted, others)
            complaint = "" if made is None else _complaint(made, len(samples), window, self.vocab_size)
        except Exception as error:
            complaint = repr(error)
        if complaint:
            self._fault(each, complaint)
            return None
        return made

    def _propose(
        self,
        each: _QueriedDrafter,
        samples: Sequence[EngineSampleState],
        window: int,
        wanted: Sequence[bool] | bool,
        others: Mapping[str, Proposals],
    ) -> Proposals | None:
        if each.sequential is not None:
            # It asks itself for which samples it is wanted, before it spends time on them.
            return each.sequential.propose_after(samples, window, others)
        if wanted is False or (wanted is not True and not any(wanted)):
            return None
        # Queried for all samples: which of them share a step must not change what a drafter learns of them.
        made = each.drafter.propose(samples, window)
        return made if wanted is True or type(made) is not Proposals else made.only(wanted)

    def _guard(self, each: _QueriedDrafter, call: Callable[[], T]) -> T | None:
        try:
            return call()
        except Exception as error:
            self._fault(each, repr(error))
            return None

    def _fault(self, each: _QueriedDrafter, what: str) -> None:
        self.metrics.fault(each.drafter.name)
        if each.faulty:
            return
        each.faulty = True
        each.faults += 1
        if each.faults == 1:
            _log.warning("drafter_fault", drafter=each.drafter.name, fault=what)
        if each.faults >= MAX_FAULTS and each.on:
            each.on = False
            _log.error("drafter_switched_off", drafter=each.drafter.name, faults=each.faults, last=what)


def _complaint(made: Proposals, samples: int, window: int, vocab_size: int) -> str:
    """Return what is wrong with proposals, or ""."""
    if type(made) is not Proposals:
        return f"{type(made).__name__} instead of proposals"
    tokens, acceptance = made.tokens, made.acceptance
    if tokens.ndim != 2 or len(tokens) != samples or not 0 < tokens.shape[1] <= window:
        return f"proposals of shape {tokens.shape} for {samples} samples of 1 to {window} tokens"
    if acceptance.shape != tokens.shape:
        return f"predictions of shape {acceptance.shape} for tokens of shape {tokens.shape}"
    if wrong := flaw(made, vocab_size):
        return wrong
    if len(made.sources) not in (0, samples) or set(map(type, made.sources)) - {str}:
        return "sources that are no names"
    return ""
