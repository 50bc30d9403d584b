"""Mode `fixed`: for each sample its best proposal, up to the draft cap, in every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from services.generation.engine.types import EngineSampleState
from services.generation.speculation.draft_lengths import DraftableBatch, DraftLengths
from services.generation.speculation.drafter import Proposals
from services.generation.speculation.modes.decision import Mode, PlanDecision, PlanReason, predicted
from services.generation.speculation.plan import Drafts, FixedLengthPlanner
from services.step_time.estimator import StepTimeEstimator


@dataclass(slots=True)
class FixedMode(Mode):
    """Drafts of fixed length in every step; the estimator only predicts what they gain."""

    fixed: FixedLengthPlanner = field(default_factory=lambda: FixedLengthPlanner(1))

    def decide(
        self, samples: Sequence[EngineSampleState], proposals: Mapping[str, Proposals], rows: int
    ) -> tuple[PlanDecision, Drafts]:
        """Return the decision about the next step, and its drafts."""
        drafts = self.fixed.choose(samples, proposals, rows)
        if not drafts:
            return PlanDecision(PlanReason.NO_PROPOSALS), drafts
        return predicted(samples, drafts, self.step_time, PlanReason.FIXED), drafts

    def passes(
        self, batch: DraftableBatch, acceptance: NDArray[np.float64], pass_time: StepTimeEstimator
    ) -> DraftLengths:
        """Return the greatest depth for every sample that has no better proposal."""
        worse = batch.expected < np.multiply.accumulate(acceptance).sum()
        return DraftLengths(np.where(worse, np.maximum(batch.room, 0), 0))
