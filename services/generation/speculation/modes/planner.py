"""Mode `planner`: choose drafts over the whole batch to maximise the predicted tokens per second.

A draft token pays if its expected accepted tokens are worth its verification time. For each sample the proposal is
picked whose tokens are worth most above the price of a verified token; then the tokens of all samples are ranked by
survival probability, and the number of them is verified for which

    (samples + expected accepted tokens) / predicted step time

is greatest. This is RLHFSpec's search (section 5.3) for chains instead of trees. RLHFSpec stops when the rate
begins to fall; here all numbers of tokens that give a recurring step size (see `batch_sizes`) are evaluated at
once. That costs no more, and finds the maximum where the flat part of a roofline ends and the rate has several.

The price of a verified token is its step time multiplied by the best rate. Steps are much like the one before, so
each begins with the price that was reached there (Dinkelbach's iteration for fractional programs, a round a step):
where step time is linear in verified tokens, plans of the same proposals come to the best choice of them, as far as
survivals are distinguished (see `selection`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.generation.engine.types import EngineSampleState
from services.generation.speculation.batch_sizes import draft_token_counts
from services.generation.speculation.drafter import Proposals
from services.generation.speculation.modes.decision import Mode, PlanDecision, PlanReason, speedup
from services.generation.speculation.modes.toggle import Latch
from services.generation.speculation.plan import Drafts, context_of, drafts, rooms
from services.generation.speculation.selection.selection import (
    RatedCount,
    SelectedCount,
    cut,
    search,
    survivals,
)

Floats = NDArray[np.float64]


@dataclass(slots=True)
class PlannerMode(Mode):
    """Up to `window` draft tokens per sample, as many in all as pay; none if they gain less than the margin."""

    window: int = 16
    latch: Latch | None = None
    graphs: tuple[int, ...] = ()
    """Numbers of verified tokens for which the engine has graphs, rising."""
    price: float = 0.0
    """Of a draft token, in accepted tokens: the time of the last ones in the step before, at its rate."""

    def decide(
        self, samples: Sequence[EngineSampleState], proposals: Mapping[str, Proposals], rows: int
    ) -> tuple[PlanDecision, Drafts]:
        """Return the decision about the next step, and its drafts."""
        names = [name for name, made in proposals.items() if _has_tokens(made.acceptance)]
        if not names:
            return PlanDecision(PlanReason.NO_PROPOSALS), Drafts()
        n, context = len(samples), context_of(samples)
        survival = survivals([proposals[name] for name in names], rooms(samples), self.window)
        counts = draft_token_counts(n, max(0, min(survival[0].size, rows - n)), self.graphs)
        seconds = self.step_time.predict(n, n + counts, context)
        plain = float(seconds[0])
        if not plain > 0.0:
            raise ValueError(f"a plain step of {n} samples is predicted to take {plain} s")
        found = search(survival, counts, seconds, self.price)
        self.price = found.best.rate * found.drafted.token_seconds
        most = self.exploration.fewer(n, found.best.tokens) if found.best.tokens else 0
        if most < found.best.tokens:
            some = counts <= most
            fewer = search(survival, counts[some], seconds[some], self.price)
            found = fewer._replace(best=fewer.drafted) if fewer.drafted.tokens else found
        reason, chosen, gain = self._weigh(found, plain)
        if not chosen.tokens:
            return PlanDecision(reason, available=gain, seconds=plain), Drafts()
        made = drafts(samples, proposals, names, *cut(survival, found, chosen.tokens))
        gain = speedup(n, made.expected, plain, chosen.seconds)
        decision = PlanDecision(reason, chosen.tokens, made.expected, gain, gain, chosen.seconds, context)
        made.saved = decision.saved
        return decision, made

    def _weigh(self, found: SelectedCount, plain: float) -> tuple[PlanReason, RatedCount, float]:
        """Return the reason, the tokens to verify, and the best speedup over a step of `plain` seconds."""
        requests, best = len(found.picks), found.best
        nothing = RatedCount(0, requests / plain, 0.0, plain, 0.0)
        gain, other = best.rate / nothing.rate, found.drafted.rate / nothing.rate
        latch = self.latch = self.latch or Latch(self.margin)
        if latch.passes(requests, gain):
            if self.exploration.should_explore(requests, gain, drafted=True):
                return PlanReason.EXPLORED_PLAIN, nothing, gain
            return PlanReason.DRAFTS, best, gain
        if found.drafted.tokens and self.exploration.should_explore(requests, other, drafted=False):
            return PlanReason.EXPLORED, found.drafted, other
        return (PlanReason.WITHIN_MARGIN if best.tokens else PlanReason.PLAIN_IS_BEST), nothing, gain


def _has_tokens(acceptance: Floats) -> bool:
    """Return True if any sample has a first token; the first sample mostly has, and is checked first."""
    return bool(acceptance.size) and bool(acceptance[0, 0] or acceptance[:, 0].any())
