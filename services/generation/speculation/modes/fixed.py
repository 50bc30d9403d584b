"""Mode `fixed`: for each sample its best proposal, up to the draft cap, in every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from services.generation.engine.types import EngineSampleState
from services.generation.speculation.draft_lengths import DraftableBatch, DraftLengths
from services.generation.speculation.drafter import Proposals
from services.generation.speculation.modes.decision import Mode, PlanDecision, PlanReason, predicted
from services.generation.speculation.plan import Drafts, FixedLengthPlanner, context_of
from services.step_time.estimator import StepTimeEstimator


@dataclass(slots=True)
class FixedMode(Mode):
    """Drafts of one length for all samples; the estimator only predicts what they gain."""

    REASONS: ClassVar = (PlanReason.OFF, PlanReason.FIXED)
    """Reasons of steps without and with drafts."""
    fixed: FixedLengthPlanner = field(default_factory=lambda: FixedLengthPlanner(1))

    def length(self, samples: int, context: float) -> int:
        """Return the draft length for so many samples of this mean context: the draft cap."""
        return self.fixed.window

    def decide(
        self, samples: Sequence[EngineSampleState], proposals: Mapping[str, Proposals], rows: int
    ) -> tuple[PlanDecision, Drafts]:
        """Return the decision about the next step, and its drafts."""
        length = self.length(len(samples), context_of(samples) / len(samples))
        if not length:
            return PlanDecision(self.REASONS[0]), Drafts()
        drafts = replace(self.fixed, window=length).choose(samples, proposals, rows)
        if not drafts:
            return PlanDecision(PlanReason.NO_PROPOSALS), drafts
        return predicted(samples, drafts, self.step_time, self.REASONS[1]), drafts

    def passes(
        self, batch: DraftableBatch, acceptance: NDArray[np.float64], pass_time: StepTimeEstimator
    ) -> DraftLengths:
        """Return that length for every sample that has no better proposal."""
        length = self.length(len(batch.room), batch.context / len(batch.room))
        worse = batch.expected < np.multiply.accumulate(acceptance[:length]).sum()
        return DraftLengths(np.where(worse, np.clip(batch.room, 0, length), 0))
