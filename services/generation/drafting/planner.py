"""The plan of a step over the whole batch: as many tokens a second as the step-time model promises.

A row pays if what it adds to the accepted tokens is worth its time. Of each sample's offers the one is taken whose
tokens bring most above the price of a row; then the tokens of all samples, best first, stand in one line, and the
beginning of it is verified with which (samples + expected accepted tokens) / predicted step time is greatest.
This is RLHFSpec's search (section 5.3) for chains. Where that one stops early, when the rate has begun to fall,
this one evaluates all lengths of the line at once that give a step a number of rows that comes again (see
`row_grid`): it costs no more, and finds the best also where a roofline's flat part ends and the rate has more than
one top.

The price of a row is what its time would earn at the rate that is reached (Dinkelbach's iteration): where the
time grows linearly with the rows the plan is the best there is, over all choices of offers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from services.generation.drafting.drafter import Offers
from services.generation.drafting.plan import (
    NOTHING,
    UNBOUNDED,
    Drafts,
    StepShape,
    context_of,
    drafts,
    rooms,
)
from services.generation.drafting.row_grid import row_counts
from services.generation.drafting.selection import Line, Rated, best_picks, least_row, survivals
from services.generation.engine.types import SampleState
from services.policy.correction import CorrectedStepTime
from services.policy.trial import LEAST, Trial

Floats = NDArray[np.float64]
_MAX_ROUNDS = 6
# Why a step is planned as it is.
NO_SAMPLES, NO_OFFERS, RESTING, PLAIN_IS_BEST, WITHIN_MARGIN, DRAFTS, TRIED, TRIED_PLAIN = (
    "no_samples",
    "no_offers",
    "resting",
    "plain_is_best",
    "within_margin",
    "drafts",
    "tried",
    "tried_plain",
)


@dataclass(frozen=True, slots=True)
class Decision:
    """What was decided for a step and what was expected of it.

    `speedup` is the predicted rate in tokens a second over that of plain decoding, 1 for a plain step; `offered`
    is the greatest that the offers promised. `seconds` is the predicted time of the step.
    """

    reason: str
    tokens: int = 0
    expected: float = 0.0
    speedup: float = 1.0
    offered: float = 1.0
    seconds: float = 0.0

    @property
    def saved(self) -> float:
        """Predicted seconds less than plain decoding takes for as many tokens."""
        return (self.speedup - 1.0) * self.seconds


class PlanMetrics(Protocol):
    """Where decisions and predictions are counted."""

    def planned(self, decision: Decision) -> None: ...
    def predicted(self, predicted: float, measured: float) -> None: ...


class _Selection(NamedTuple):
    """The best beginning of a line, and the best one with any token."""

    line: Line
    plain: float
    """The rate without drafts."""
    best: Rated
    other: Rated


@dataclass(slots=True)
class PlannedDrafts:
    """At most `window` tokens a sample and step, as many in all as pay; none for a gain below `margin`."""

    window: int
    step_time: CorrectedStepTime
    margin: float = 0.0
    metrics: PlanMetrics | None = None
    last: Decision = field(default_factory=lambda: Decision(NO_SAMPLES))
    trial: Trial = field(default_factory=Trial)
    """Told of steps by whoever decides them all."""

    measures = True
    """Whether `stepped` wants to know."""

    def rest(self, samples: Sequence[SampleState]) -> None:
        """A step is not planned: drafters rest."""
        self.last = Decision(RESTING)
        if self.metrics is not None:
            self.metrics.planned(self.last)

    def rest_on(self) -> None:
        """Nor is the one after it, of the same samples."""
        self.rest(())

    def choose(
        self, samples: Sequence[SampleState], offers: Mapping[str, Offers], rows: int = UNBOUNDED
    ) -> Drafts:
        """The drafts of a step.

        Args:
            samples: the samples that can verify a draft.
            offers: of each drafter that makes any.
            rows: that these samples and their draft tokens may have together, at most.
        """
        self.last, drafts = self._decide(samples, offers, rows)
        if self.metrics is not None:
            self.metrics.planned(self.last)
        return drafts

    def stepped(self, shape: StepShape, seconds: float) -> None:
        """A step of this shape took so long."""
        predicted = self.step_time.observe(shape.requests, shape.rows, shape.context, seconds)
        if self.metrics is not None:
            self.metrics.predicted(predicted, seconds)

    def _decide(
        self, samples: Sequence[SampleState], offers: Mapping[str, Offers], rows: int
    ) -> tuple[Decision, Drafts]:
        if not samples:
            return Decision(NO_SAMPLES), Drafts()
        names = [name for name, made in offers.items() if _offers_any(made.acceptance)]
        if not names:
            return Decision(NO_OFFERS), Drafts()
        made = [offers[name] for name in names]
        survival = survivals(made, rooms(samples), self.window)
        selection = self._search(survival, context_of(samples), rows)
        reason, chosen, gain = self._weighed(selection)
        count, seconds = chosen.tokens, chosen.seconds
        if not count:
            return Decision(reason, offered=gain, seconds=seconds), Drafts()
        decision = Decision(reason, count, chosen.expected, gain, gain, seconds)
        line = selection.line
        made_of = drafts(samples, offers, names, line.picks, line.cut(count), chosen.expected)
        made_of.saved = decision.saved
        return decision, made_of

    def _weighed(self, selection: _Selection) -> tuple[str, Rated, float]:
        """Why and what is done, and the speedup that was on offer."""
        best, other, plain = selection.best, selection.other, selection.plain
        requests = len(selection.line.picks)
        gain, nothing = best.rate / plain, Rated(0, plain, 0.0, requests / plain, 0.0)
        if best.tokens and gain >= 1 + self.margin:
            if self.trial.made(requests, gain, drafted=True):
                return TRIED_PLAIN, nothing, gain
            return DRAFTS, best, gain
        if other.tokens and self.trial.made(requests, tried := other.rate / plain, drafted=False):
            return TRIED, other, tried
        return (WITHIN_MARGIN if best.tokens else PLAIN_IS_BEST), nothing, gain

    def _search(self, survival: Floats, context: int, rows: int) -> _Selection:
        """The best selection over picks at prices that follow the rate."""
        drafters, requests, width = survival.shape
        counts = row_counts(requests, max(0, min(requests * width, rows - requests)))
        curve = self.step_time.curve(requests, context)
        # No rate is below the plain one, so no token that is worth less than the cheapest row at it is ever taken,
        # if not for a trial.
        plain = requests / curve.seconds(0)
        price = max(plain * least_row(counts, curve), NOTHING)
        least = LEAST * price
        best: _Selection | None = None
        tried = b""
        for _ in range(_MAX_ROUNDS if drafters > 1 else 1):
            picks = best_picks(survival, price)
            if (key := picks.tobytes()) == tried:
                break
            line = Line(survival, picks, least)
            selection = _Selection(line, plain, *line.evaluate(counts, curve))
            if best is None or selection.best.rate > best.best.rate:
                best = selection
            # What the last rows would have earned.
            price = selection.best.rate * selection.best.row
            tried = key
        assert best is not None
        return best


def _offers_any(acceptance: Floats) -> bool:
    """Whether any sample has a first token; mostly the first one has."""
    return bool(acceptance.size) and bool(acceptance[0, 0] or acceptance[:, 0].any())
