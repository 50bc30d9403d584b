"""Mode `planner`: choose drafts over the whole batch to maximise the predicted tokens per second.

A draft token pays if its expected accepted tokens are worth its verification time. For each sample the proposal is
picked whose tokens are worth most above the price of a verified token; then the tokens of all samples are ranked by
survival probability, and the number of them is verified for which

    (samples + expected accepted tokens) / predicted step time

is greatest. This is RLHFSpec's search (section 5.3), for chains, and for trees where a drafter proposes branches:
survival falls along each path, so the best tokens are a tree. RLHFSpec stops when the rate
begins to fall; here all numbers of tokens that give a recurring step size (see `batch_sizes`) are evaluated at
once. That costs no more, and finds the maximum where the flat part of a roofline ends and the rate has several.

The price of a verified token is its step time multiplied by the best rate. Steps are much like the one before, so
each begins with the price that was reached there (Dinkelbach's iteration for fractional programs, a round a step):
where step time is linear in verified tokens, plans of the same proposals come to the best choice of them, as far as
survivals are distinguished (see `selection`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from services.generation.speculation.batch_sizes import draft_token_counts
from services.generation.speculation.drafter import ProposalsByName, Samples
from services.generation.speculation.modes.decision import Mode, PlanReason
from services.generation.speculation.plan import UNBOUNDED, Drafts, add_branches, context_of, drafts, rooms
from services.generation.speculation.selection.selection import branch_survival, cut, search, survivals


@dataclass(slots=True)
class PlannerMode(Mode):
    """Up to `draft_cap` draft tokens per sample, as many in all as pay; none if they gain less than the margin."""

    REASONS = (PlanReason.PLAIN_IS_BEST, PlanReason.DRAFTS)
    price: float = 0.0
    """Of a draft token, in accepted tokens: the time of the last ones in the step before, at its rate."""

    def choose(self, samples: Samples, proposals: ProposalsByName, rows: int = UNBOUNDED) -> Drafts:
        """Return the drafts of the next step; see `DraftPlanner`."""
        if not proposals:
            return self.plain(PlanReason.NO_PROPOSALS)
        n = len(samples)
        made, room = list(proposals.values()), rooms(samples)
        survival = survivals(made, room, self.knobs.draft_cap)
        branches = (
            branch_survival(made, room, survival) if any(each.branches is not None for each in made) else None
        )
        # Between the sizes of two graphs all tokens that there are is a number as well.
        proposed = int(survival.any(0).sum()) if self.graphs else survival[0].size
        if self.graphs and branches is not None:
            proposed += int(np.count_nonzero(branches.survival))
        counts = draft_token_counts(n, max(0, min(proposed, rows - n)), self.graphs)
        seconds = self.step_time.predict(n, n + counts, context_of(samples))
        plain = float(seconds[0])
        if not plain > 0.0:
            raise ValueError(f"a plain step of {n} samples is predicted to take {plain} s")
        found = search(survival, counts, seconds, self.price, branches)
        if not found.tokens:
            return self.plain(PlanReason.NO_PROPOSALS, seconds=plain)
        rate = n / plain
        self.price = max(found.rate, rate) * found.token_seconds
        if found.rate > rate and (most := self.exploration.fewer(n, found.tokens)) < found.tokens:
            few = max(int((counts <= most).sum()), 2)
            found = search(survival, counts[:few], seconds[:few], self.price, branches)
        gain = found.rate / rate
        drafting, reason = self.weigh(n, gain)
        if not drafting:
            if reason == PlanReason.PLAIN_IS_BEST and gain > 1.0:
                reason = PlanReason.WITHIN_MARGIN
            return self.plain(reason, max(gain, 1.0), plain)
        lengths, expected, taken = cut(survival, found, branches)
        chosen = drafts(samples, proposals, found.picks, lengths, expected)
        if branches is not None and taken is not None:
            add_branches(chosen, samples, list(proposals)[branches.drafter], proposals, taken)
        self.draft(reason, n, chosen, plain, found.seconds)
        chosen.saved = self.last.saved
        return chosen
