"""Modes `fixed` and `planner`, which choose how many draft tokens a step verifies; others are experiments."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from services.contracts.plan_reasons import PlanReason
from services.generation.speculation.decision import Mode
from services.generation.speculation.drafter import ProposalsByName, Samples
from services.generation.speculation.plan import (
    UNBOUNDED,
    DraftableBatch,
    DraftLengths,
    Drafts,
    add_branches,
    context_of,
    drafts,
    rooms,
)
from services.generation.speculation.selection.selection import (
    Floats,
    branch_survival,
    cut,
    draft_token_counts,
    search,
    survivals,
)
from services.step_time.estimator import StepTimeEstimator


@dataclass(slots=True)
class FixedMode(Mode):
    """Mode `fixed`: for each sample its best proposal, up to the draft cap, in every step.

    The estimator only predicts what the drafts gain.
    """

    def length(self, samples: int, context: float) -> int:
        """Return the draft length of a batch with this mean context: the draft cap."""
        return self.knobs.draft_cap

    def choose(self, samples: Samples, proposals: ProposalsByName, rows: int = UNBOUNDED) -> Drafts:
        """Return the drafts of the next step; see `DraftPlanner`."""
        n, context = len(samples), context_of(samples)
        length = self.length(n, context / n)
        drafts = replace(self.fixed, window=length).choose(samples, proposals, rows) if length else Drafts()
        if not drafts.tokens:
            return self.plain(PlanReason.NO_PROPOSALS if length else self.REASONS[0])
        plain, seconds = self.step_time.predict(n, (n, n + drafts.count), context).tolist()
        return self.draft(self.REASONS[1], n, drafts, plain, seconds)

    def passes(self, batch: DraftableBatch, acceptance: Floats, pass_time: StepTimeEstimator) -> DraftLengths:
        """Return that length for every sample that has no better proposal."""
        length = self.length(len(batch.room), batch.context / len(batch.room))
        worse = batch.expected < np.multiply.accumulate(acceptance[:length]).sum()
        return DraftLengths(np.where(worse, np.clip(batch.room, 0, length), 0))


@dataclass(slots=True)
class PlannerMode(Mode):
    """Mode `planner`: drafts over the whole batch that maximise the predicted tokens per second.

    For each sample the proposal is picked whose tokens are worth most above the price of a verified token; then the
    tokens of all samples, at most `draft_cap` each, are ranked by survival probability, and the number of them is
    verified for which

        (samples + expected accepted tokens) / predicted step time

    is greatest; none if they gain less than the margin. This is RLHFSpec's search (section 5.3), for chains, and
    for trees where a drafter proposes branches: survival falls along each path, so the best tokens are a tree.
    RLHFSpec stops when the rate begins to fall; here all numbers of tokens that give a recurring step size (see
    `draft_token_counts`) are evaluated at once. That costs no more, and finds the maximum where the flat part of a
    roofline ends and the rate has several.

    The price of a verified token is its step time multiplied by the best rate. Steps are much like the previous
    one, so each begins with the price that was reached there (Dinkelbach's iteration for fractional programs, a
    round a step): where step time is linear in verified tokens, plans of the same proposals come to the best choice
    of them, within the buckets of survival.
    """

    REASONS = (PlanReason.PLAIN_IS_BEST, PlanReason.DRAFTS)
    price: float = 0.0
    """Price of a draft token, in accepted tokens: the time of the last ones in the previous step, at its rate."""

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
        # Between the sizes of two graphs the number of all proposed tokens is tried as well.
        proposed = survival[0].size
        if self.graphs:
            proposed = int(np.count_nonzero(survival if len(made) == 1 else survival.any(0)))
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
