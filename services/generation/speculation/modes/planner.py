"""Mode `planner`: choose drafts over the whole batch to maximise the predicted tokens per second.

A draft token pays if its expected accepted tokens are worth its verification time. For each sample the proposal is
picked whose tokens are worth most above the price of a verified token; then the tokens of all samples are ranked by
survival probability, and the number of them is verified for which

    (samples + expected accepted tokens) / predicted step time

is greatest, of those that the loss budget allows. This is RLHFSpec's search (section 5.3) for chains instead of
trees. RLHFSpec stops when the rate begins to fall; here all numbers of tokens that give a recurring step size (see
`batch_sizes`) are evaluated at once. That costs no more, and finds the maximum where the flat part of a roofline
ends and the rate has several local maxima.

The price of a verified token is its step time multiplied by the best rate (Dinkelbach's iteration for fractional
programs): where step time is linear in verified tokens, the plan is optimal over all choices of proposals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from services.generation.engine.types import EngineSampleState
from services.generation.speculation.batch_sizes import draft_token_counts
from services.generation.speculation.drafter import Proposals
from services.generation.speculation.exploration import MIN_SPEEDUP
from services.generation.speculation.modes.decision import Mode, PlanDecision, PlanReason
from services.generation.speculation.modes.toggle import Latch
from services.generation.speculation.plan import NOTHING, Drafts, context_of, drafts, rooms
from services.generation.speculation.selection.selection import (
    RankedTokens,
    RatedCount,
    best_picks,
    min_token_seconds,
    survivals,
)

Floats = NDArray[np.float64]
_MAX_ROUNDS = 6


class _Selection(NamedTuple):
    """Ranked tokens of one choice of proposals, and the best numbers of them."""

    ranked: RankedTokens
    plain: float
    """Rate without drafts, in tokens per second."""
    best: RatedCount
    best_drafted: RatedCount
    """The best number above 0."""


@dataclass(slots=True)
class PlannerMode(Mode):
    """Up to `window` draft tokens per sample, as many in all as pay; none if they gain less than the margin."""

    window: int = 16
    latch: Latch | None = None

    def decide(
        self, samples: Sequence[EngineSampleState], proposals: Mapping[str, Proposals], rows: int
    ) -> tuple[PlanDecision, Drafts]:
        """Return the decision about the next step, and its drafts."""
        if not samples:
            return PlanDecision(PlanReason.NO_SAMPLES), Drafts()
        names = [name for name, made in proposals.items() if _has_tokens(made.acceptance)]
        if not names:
            return PlanDecision(PlanReason.NO_PROPOSALS), Drafts()
        survival = survivals([proposals[name] for name in names], rooms(samples), self.window)
        context = context_of(samples)
        selection = self._search(survival, context, rows)
        reason, chosen, gain = self._weigh(selection)
        count, seconds = chosen.tokens, chosen.seconds
        if not count:
            return PlanDecision(reason, available=gain, seconds=seconds), Drafts()
        decision = PlanDecision(reason, count, chosen.expected, gain, gain, seconds, context)
        ranked = selection.ranked
        made = drafts(samples, proposals, names, ranked.picks, ranked.cut(count), chosen.expected)
        made.saved = decision.saved
        return decision, made

    def _weigh(self, selection: _Selection) -> tuple[PlanReason, RatedCount, float]:
        """Return the reason, the number of tokens to verify, and the best speedup."""
        best, other, plain = selection.best, selection.best_drafted, selection.plain
        requests = len(selection.ranked.picks)
        gain, nothing = best.rate / plain, RatedCount(0, plain, 0.0, requests / plain, 0.0)
        latch = self.latch = self.latch or Latch(self.margin)
        if latch.passes(requests, gain):
            if self.exploration.should_explore(requests, gain, drafted=True):
                return PlanReason.EXPLORED_PLAIN, nothing, gain
            return PlanReason.DRAFTS, best, gain
        if other.tokens and self.exploration.should_explore(
            requests, other_gain := other.rate / plain, drafted=False
        ):
            return PlanReason.EXPLORED, other, other_gain
        return (PlanReason.WITHIN_MARGIN if best.tokens else PlanReason.PLAIN_IS_BEST), nothing, gain

    def _search(self, survival: Floats, context: int, rows: int) -> _Selection:
        """Return the best selection over choices of proposals, at prices that follow the rate."""
        drafters, requests, width = survival.shape
        counts = draft_token_counts(requests, max(0, min(requests * width, rows - requests)))
        seconds = self.step_time.predict(requests, requests + counts, context)
        base = float(seconds[0])
        limits = self.budget.seconds(base), self.budget.token_seconds(base, requests)
        # The best rate is at least the plain one, so a token worth less than the cheapest verified token at the
        # plain rate is never chosen, except to explore.
        plain = requests / base
        price = max(plain * min_token_seconds(counts, seconds), NOTHING)
        least = MIN_SPEEDUP * price
        best: _Selection | None = None
        tried = b""
        for _ in range(_MAX_ROUNDS if drafters > 1 else 1):
            picks = best_picks(survival, price)
            if (key := picks.tobytes()) == tried:
                break
            ranked = RankedTokens(survival, picks, least)
            selection = _Selection(ranked, plain, *ranked.evaluate(counts, seconds, *limits))
            if best is None or selection.best.rate > best.best.rate:
                best = selection
            # The time of the last tokens at the rate that was reached.
            price = selection.best.rate * selection.best.token_seconds
            tried = key
        assert best is not None
        most = self.exploration.fewer(requests, best.best.tokens) if best.best.tokens else 0
        if most < best.best.tokens:
            counts = counts[counts <= most]
            fewer = best.ranked.evaluate(counts, seconds[: len(counts)], *limits)[1]
            best = best if not fewer.tokens else best._replace(best=fewer, best_drafted=fewer)
        return best


def _has_tokens(acceptance: Floats) -> bool:
    """Return True if any sample has a first token; the first sample mostly has, and is checked first."""
    return bool(acceptance.size) and bool(acceptance[0, 0] or acceptance[:, 0].any())
