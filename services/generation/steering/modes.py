"""The modes besides the planner: drafts of fixed length, always, when they pay, or as a table says.

Each chooses like `FixedPlan`, and says in `last` what it decided and why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from services.generation.drafting.drafter import Offers
from services.generation.drafting.plan import Drafts, FixedPlan, context_of
from services.generation.drafting.planner import (
    DRAFTS,
    NO_OFFERS,
    NO_SAMPLES,
    TRIED,
    TRIED_PLAIN,
    Decision,
    PlannedDrafts,
)
from services.generation.engine.types import SampleState
from services.policy.correction import CorrectedStepTime
from services.policy.solver import BATCHES, Table, measured_acceptance, solve
from services.policy.toggle import Toggle, speedup
from services.policy.trial import Trial

FIXED, TOGGLED_ON, TOGGLED_OFF, TABLE, TABLE_PLAIN, OFF = (
    "fixed",
    "toggled_on",
    "toggled_off",
    "table",
    "table_plain",
    "off",
)
"""Why steps of these modes are planned as they are; OFF: speculation is switched off."""
# Assumed of a draft token before any was verified.
_PRIOR = 0.6
# Engine steps after which the table is made anew within a step.
_SOLVED_FOR = 256

Made = Mapping[str, Offers]


class Mode(Protocol):
    """Chooses drafts for a step; see `FixedPlan.choose`."""

    @property
    def last(self) -> Decision: ...

    def choose(self, samples: Sequence[SampleState], offers: Made, rows: int) -> Drafts: ...


@dataclass(slots=True)
class FixedDrafts:
    """Drafts of fixed length in every step."""

    fixed: FixedPlan
    step_time: CorrectedStepTime | None = None
    last: Decision = field(default_factory=lambda: Decision(NO_SAMPLES))

    def choose(self, samples: Sequence[SampleState], offers: Made, rows: int) -> Drafts:
        """See `Mode`."""
        drafts = self.fixed.choose(samples, offers, rows)
        self.last = _judged(samples, drafts, self.step_time) if drafts else Decision(NO_OFFERS)
        return drafts


@dataclass(slots=True)
class ToggledDrafts:
    """Drafts of fixed length in the steps in which they pay, by the step-time model (EfficientRollout 4.2)."""

    fixed: FixedPlan
    step_time: CorrectedStepTime
    toggle: Toggle
    trial: Trial = field(default_factory=Trial)
    last: Decision = field(default_factory=lambda: Decision(NO_SAMPLES))

    def choose(self, samples: Sequence[SampleState], offers: Made, rows: int) -> Drafts:
        """See `Mode`."""
        drafts = self.fixed.choose(samples, offers, rows)
        if not drafts:
            self.last = Decision(NO_OFFERS)
            return Drafts()
        judged = _judged(samples, drafts, self.step_time)
        on = self.toggle.decide(len(samples), judged.speedup)
        tried = self.trial.made(len(samples), judged.speedup, drafted=on)
        drafted = on != tried
        if not drafted:
            self.last = Decision(TRIED_PLAIN if tried else TOGGLED_OFF, offered=judged.speedup)
            return Drafts()
        self.last = replace(judged, reason=TRIED if tried else TOGGLED_ON)
        drafts.saved = judged.saved
        return drafts


@dataclass(slots=True)
class SolvedDrafts:
    """Drafts of the length that the solver found for the batch size (ReSpec 5.2).

    The table is made when a step of a run begins, and now and then in one, from the model as it is corrected then
    and from what was accepted so far. Old counts fade, so that a length that did not pay is tried again some time.
    """

    fixed: FixedPlan
    step_time: CorrectedStepTime
    margin: float
    last: Decision = field(default_factory=lambda: Decision(NO_SAMPLES))
    table: Table | None = None
    _reached: list[float] = field(init=False)
    _kept: list[float] = field(init=False)
    _age: int = 0

    def __post_init__(self) -> None:
        self._reached = [0.0] * self.fixed.window
        self._kept = [0.0] * self.fixed.window

    def choose(self, samples: Sequence[SampleState], offers: Made, rows: int) -> Drafts:
        """See `Mode`."""
        table = self.table if self._age else None
        if table is None:
            table = self._solve(samples)
        self._age = (self._age + 1) % _SOLVED_FOR
        row = table.look_up(len(samples))
        if not row.best.n:
            self.last = Decision(TABLE_PLAIN)
            return Drafts()
        drafts = replace(self.fixed, window=row.best.n).choose(samples, offers, rows)
        if not drafts:
            self.last = Decision(NO_OFFERS)
            return Drafts()
        self.last = replace(_judged(samples, drafts, self.step_time), reason=TABLE)
        return drafts

    def new_step(self) -> None:
        """A step of a run begins: the table is made anew."""
        self._age = 0

    def verified(self, drafted: int, accepted: int) -> None:
        """A draft was verified: a token is reached if all before it were accepted."""
        for position in range(min(drafted, accepted + 1, len(self._reached))):
            self._reached[position] += 1
            self._kept[position] += position < accepted

    def _solve(self, samples: Sequence[SampleState]) -> Table:
        acceptance = measured_acceptance(self._reached, self._kept, _PRIOR)
        context = context_of(samples) / len(samples)
        batches = sorted({*BATCHES, len(samples)})
        self.table = solve(self.step_time, acceptance, context, batches=batches, margin=self.margin)
        self._reached = [each / 2 for each in self._reached]
        self._kept = [each / 2 for each in self._kept]
        return self.table


@dataclass(slots=True)
class Latched:
    """A planner whose margin, once it was reached, is not asked for again until the batch grows."""

    planner: PlannedDrafts
    margin: float
    _batch: int = 0

    @property
    def last(self) -> Decision:
        """See `Mode`."""
        return self.planner.last

    def choose(self, samples: Sequence[SampleState], offers: Made, rows: int) -> Drafts:
        """See `Mode`."""
        if len(samples) > self._batch:
            self._batch = 0
        self.planner.margin = 0.0 if self._batch else self.margin
        drafts = self.planner.choose(samples, offers, rows)
        if self.planner.last.reason == DRAFTS:
            self._batch = len(samples)
        return drafts


def _judged(samples: Sequence[SampleState], drafts: Drafts, step_time: CorrectedStepTime | None) -> Decision:
    """What drafts promise, by the drafters' own predictions and the step-time model."""
    tokens, expected = drafts.count, drafts.expected
    if step_time is None:
        return Decision(FIXED, tokens, expected)
    requests, context = len(samples), context_of(samples)
    curve = step_time.curve(requests, context)
    plain, drafted = curve.seconds(0), curve.seconds(tokens)
    gain = speedup(requests, expected, plain, drafted)
    return Decision(FIXED, tokens, expected, gain, gain, drafted)
