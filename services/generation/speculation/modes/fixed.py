"""Mode `fixed`: for each sample its best proposal, up to the draft cap, in every step."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from services.generation.speculation.draft_lengths import DraftableBatch, DraftLengths
from services.generation.speculation.drafter import ProposalsByName, Samples
from services.generation.speculation.modes.decision import Mode, PlanReason
from services.generation.speculation.plan import UNBOUNDED, Drafts, context_of
from services.generation.speculation.selection.selection import Floats
from services.step_time.estimator import StepTimeEstimator


@dataclass(slots=True)
class FixedMode(Mode):
    """Drafts of one length for all samples; the estimator only predicts what they gain."""

    def length(self, samples: int, context: float) -> int:
        """Return the draft length for so many samples of this mean context: the draft cap."""
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
