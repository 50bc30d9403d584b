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
    Drafts,
    StepShape,
    context_of,
    drafts,
    limits,
    survivals,
)
from services.generation.drafting.row_grid import row_counts
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


class _Times(NamedTuple):
    """Times of steps, [c], by number of draft tokens, the first of which is 0."""

    counts: NDArray[np.int64]
    raw: Floats
    seconds: Floats
    """`raw` as measured steps have corrected it."""
    marginal: Floats
    """Seconds of each row between two counts, [c - 1]."""


class _Selection(NamedTuple):
    """The beginnings of the line for given picks, by their places among the numbers of draft tokens."""

    rate: float
    best: int
    """The place at which the rate is greatest, and that rate."""
    rates: Floats
    expected: Floats
    times: _Times
    picks: NDArray[np.int64]
    """The drafter of each sample, [n]."""
    picked: Floats
    """The survival of its tokens, [n, width]."""
    line: Floats


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
    # Of the step that was planned last: its samples, draft tokens and context, its uncorrected time, and what of
    # that is verification.
    _timed: tuple[int, int, int] | None = field(init=False, default=None)
    _raw: tuple[float, float] = field(init=False, default=(0.0, 0.0))

    measures = True
    """Whether `stepped` wants to know."""

    def rest(self, samples: Sequence[SampleState]) -> None:
        """A step is not planned: drafters rest."""
        self._timed = None
        self.last = Decision(RESTING)
        if self.metrics is not None:
            self.metrics.planned(self.last)

    def rest_on(self) -> None:
        """Nor is the one after it, of the same samples."""
        self.rest(())

    def choose(self, samples: Sequence[SampleState], offers: Mapping[str, Offers]) -> Drafts:
        """The drafts of a step.

        Args:
            samples: the samples that can verify a draft.
            offers: of each drafter that makes any.
        """
        # What an earlier step was to take says nothing of one that is not planned.
        self._timed = None
        self.last, drafts = self._decide(samples, offers)
        if self.metrics is not None:
            self.metrics.planned(self.last)
        return drafts

    def stepped(self, shape: StepShape, seconds: float) -> None:
        """A step of this shape took so long."""
        # Told once: a step that was not planned, such as of samples that reuse rollouts, has none of it.
        timed, self._timed = self._timed, None
        if (shape.requests, shape.rows - shape.requests, shape.context) == timed:
            predicted = self.step_time.learn(*self._raw, seconds)
        else:
            predicted = self.step_time.observe(shape.requests, shape.rows, shape.context, seconds)
        if self.metrics is not None:
            self.metrics.predicted(predicted, seconds)

    def _decide(
        self, samples: Sequence[SampleState], offers: Mapping[str, Offers]
    ) -> tuple[Decision, Drafts]:
        if not samples:
            return Decision(NO_SAMPLES), Drafts()
        names = [name for name, made in offers.items() if _offers_any(made.acceptance)]
        if not names:
            return Decision(NO_OFFERS), Drafts()
        made = [offers[name] for name in names]
        survival = survivals(made, limits(samples, self.window), self.window)
        context = context_of(samples)
        selection = self._search(survival, context)
        reason, best, gain = self._weighed(selection)
        times = selection.times
        count, seconds = int(times.counts[best]), float(times.seconds[best])
        raw = float(times.raw[best])
        self._timed, self._raw = (len(samples), count, context), (raw, raw - float(times.raw[0]))
        if not count:
            return Decision(reason, offered=gain, seconds=seconds), Drafts()
        expected = float(selection.expected[best])
        decision = Decision(reason, count, expected, gain, gain, seconds)
        lengths = _lengths(selection.picked, selection.line, count)
        made_of = drafts(samples, offers, names, selection.picks, lengths, expected)
        made_of.saved = decision.saved
        return decision, made_of

    def _weighed(self, selection: _Selection) -> tuple[str, int, float]:
        """Why and what is done: the place among numbers of draft tokens, and the speedup that was on offer."""
        best, rates = selection.best, selection.rates
        plain = float(rates[0])
        gain = selection.rate / plain
        if best and gain >= 1 + self.margin:
            if self.trial.made(gain, drafted=True):
                return TRIED_PLAIN, 0, gain
            return DRAFTS, best, gain
        if len(rates) > 1:
            other = best or 1 + int(rates[1:].argmax())
            if self.trial.made(float(rates[other]) / plain, drafted=False):
                return TRIED, other, float(rates[other]) / plain
        return (WITHIN_MARGIN if best else PLAIN_IS_BEST), 0, gain

    def _search(self, survival: Floats, context: int) -> _Selection:
        """The best selection over picks at prices that follow the rate."""
        drafters, requests, width = survival.shape
        times = self._times(requests, row_counts(requests, requests * width), context)
        # No rate is below the plain one, so no token that is worth less than the cheapest row at it is ever taken,
        # if not for a trial.
        price = max(requests / float(times.seconds[0]) * float(times.marginal.min()), NOTHING)
        least = LEAST * price
        if drafters == 1:
            return self._select(survival[0], np.zeros(requests, np.int64), times, least, context)
        best: _Selection | None = None
        tried = b""
        ones, places = np.ones(width), np.arange(requests)
        worth, offered = np.empty_like(survival), survival.reshape(-1, width)
        for _ in range(_MAX_ROUNDS):
            # What tokens bring above the price, and the price for each place: the latter is the same for all.
            picks = (np.maximum(survival, price, out=worth) @ ones).argmax(0)
            if (key := picks.tobytes()) == tried:
                break
            picked = offered.take(picks * requests + places, axis=0)
            selection = self._select(picked, picks, times, least, context)
            if best is None or selection.rate > best.rate:
                best = selection
            price = selection.rate * (
                float(selection.times.marginal[selection.best - 1]) if selection.best else 0.0
            )
            tried = key
        assert best is not None
        return best

    def _times(self, requests: int, counts: NDArray[np.int64], context: int) -> _Times:
        raw, seconds = self.step_time.drafting(requests, counts, context)
        return _Times(counts, raw, seconds, (seconds[1:] - seconds[:-1]) / (counts[1:] - counts[:-1]))

    def _select(
        self, picked: Floats, picks: NDArray[np.int64], times: _Times, least: float, context: int
    ) -> _Selection:
        """The beginning of the line that pays best.

        Survival falls along each offer, so the best tokens of all are beginnings of offers. Tokens that survive
        with a probability below `least` are left out.
        """
        requests = len(picks)
        line = picked[picked >= least]
        line.sort()
        line = line[::-1]
        if times.counts[1] > len(line) > 0:
            # Too few for a step of the grid.
            times = self._times(requests, np.array([0, len(line)]), context)
        counts = times.counts[: int(times.counts.searchsorted(len(line), side="right"))]
        expected = np.zeros(len(counts))
        if len(counts) > 1:
            np.add.reduceat(line[: counts[-1]], counts[:-1]).cumsum(out=expected[1:])
        rates = (expected + requests) / times.seconds[: len(counts)]
        best = int(rates.argmax())
        return _Selection(float(rates[best]), best, rates, expected, times, picks, picked, line)


def _offers_any(acceptance: Floats) -> bool:
    """Whether any sample has a first token; mostly the first one has."""
    return bool(acceptance.size) and bool(acceptance[0, 0] or acceptance[:, 0].any())


def _lengths(survival: Floats, line: Floats, count: int) -> NDArray[np.int64]:
    """Tokens of each sample among the first `count` > 0 of the line; of equal ones the first samples' come."""
    last = line[count - 1]
    if count == len(line) or line[count] < last:
        # Survival falls, so the first below is where they end; counting takes several times as long.
        below = survival < last
        lengths = below.argmax(axis=1)
        lengths[(lengths == 0) & ~below[:, 0]] = below.shape[1]
        return lengths
    lengths = np.count_nonzero(survival > last, axis=1)
    ties = np.count_nonzero(survival == last, axis=1)
    left = count - int(lengths.sum())
    before = np.cumsum(ties) - ties
    return lengths + np.clip(left - before, 0, ties)
