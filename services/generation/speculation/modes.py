"""Modes `fixed` and `planner`, which choose how many draft tokens a step verifies; others are experiments."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from services.contracts.modes import PlanReason
from services.generation.speculation.decision import Mode
from services.generation.speculation.drafter import ProposalsByName, Samples
from services.generation.speculation.plan import (
    UNBOUNDED,
    DraftableBatch,
    DraftLengths,
    Drafts,
    context_of,
    drafts,
    rooms,
)
from services.generation.speculation.selection import (
    Floats,
    Ints,
    SelectedCount,
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
class ProposedTokens:
    """Proposed tokens of a step, by the survival [drafters, n, width] of the tokens of each drafter's proposals."""

    survival: Floats

    @property
    def proposed(self) -> int:
        """Number of the tokens, if each sample has its longest proposal."""
        return int(np.count_nonzero(self.survival if len(self.survival) == 1 else self.survival.any(0)))

    def search(self, counts: Ints, seconds: Floats, price: float) -> SelectedCount:
        """Return the best of the `counts` of tokens to verify (see `selection.search`)."""
        return search(self.survival, counts, seconds, price)

    def cut(self, samples: Samples, proposals: ProposalsByName, found: SelectedCount) -> Drafts:
        """Return the drafts of the tokens that were found."""
        lengths, expected = cut(self.survival, found)
        return drafts(samples, proposals, found.picks, lengths, expected)


@dataclass(slots=True)
class PlannerMode(Mode):
    """Mode `planner`: drafts over the whole batch that maximise the predicted tokens per second.

    For each sample the proposal is picked whose tokens are worth most above the price of a verified token; then the
    tokens of all samples, at most `draft_cap` each, are ranked by survival probability, and the number of them is
    verified for which

        (samples + expected accepted tokens) / predicted step time

    is greatest; none if they gain less than the margin. This is RLHFSpec's search (section 5.3), for chains.
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

    def candidates(self, proposals: ProposalsByName, room: Ints) -> ProposedTokens:
        """Return the proposed tokens, at most `room` [n] of each sample."""
        return ProposedTokens(survivals(list(proposals.values()), room, self.knobs.draft_cap))

    def choose(self, samples: Samples, proposals: ProposalsByName, rows: int = UNBOUNDED) -> Drafts:
        """Return the drafts of the next step; see `DraftPlanner`."""
        if not proposals:
            return self.plain(PlanReason.NO_PROPOSALS)
        n = len(samples)
        offered = self.candidates(proposals, rooms(samples))
        # Between the sizes of two graphs the number of all proposed tokens is tried as well.
        proposed = offered.proposed if self.graphs else offered.survival[0].size
        counts = draft_token_counts(n, max(0, min(proposed, rows - n)), self.graphs)
        seconds = self.step_time.predict(n, n + counts, context_of(samples))
        plain = float(seconds[0])
        if not plain > 0.0:
            raise ValueError(f"a plain step of {n} samples is predicted to take {plain} s")
        found = offered.search(counts, seconds, self.price)
        if not found.tokens:
            return self.plain(PlanReason.NO_PROPOSALS, seconds=plain)
        rate = n / plain
        self.price = max(found.rate, rate) * found.token_seconds
        if found.rate > rate and (most := self.exploration.fewer(n, found.tokens)) < found.tokens:
            few = max(int((counts <= most).sum()), 2)
            found = offered.search(counts[:few], seconds[:few], self.price)
        gain = found.rate / rate
        drafting, reason = self.weigh(n, gain)
        if not drafting:
            if reason == PlanReason.PLAIN_IS_BEST and gain > 1.0:
                reason = PlanReason.WITHIN_MARGIN
            return self.plain(reason, max(gain, 1.0), plain)
        chosen = offered.cut(samples, proposals, found)
        self.draft(reason, n, chosen, plain, found.seconds)
        chosen.saved = self.last.saved
        return chosen
