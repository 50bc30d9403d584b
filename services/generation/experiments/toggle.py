"""Mode `toggle`: drafts of fixed length where they are predicted to pay (EfficientRollout, section 4.2)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from services.contracts.plan_reasons import PlanReason
from services.generation.speculation.drafter import ProposalsByName, Samples
from services.generation.speculation.modes import FixedMode
from services.generation.speculation.plan import (
    UNBOUNDED,
    DraftableBatch,
    DraftLengths,
    Drafts,
    predicted_gain,
)
from services.generation.speculation.selection import Floats
from services.step_time.estimator import StepTimeEstimator


@dataclass(slots=True)
class ToggleMode(FixedMode):
    """Mode `toggle`: drafts of fixed length in the steps in which they are predicted to pay.

    They pay where the predicted speedup over plain decoding is at least 1 + margin (the tau of EfficientRollout,
    section 4.2), with the passes of a draft model counted (equation 1). The paper keeps speculation on to the end
    of the rollout; see `Mode.pays` for the latch that is used here. In some other steps drafts are verified to
    measure them.
    """

    REASONS = (PlanReason.TOGGLED_OFF, PlanReason.TOGGLED_ON)
    SWITCHES = True

    def choose(self, samples: Samples, proposals: ProposalsByName, rows: int = UNBOUNDED) -> Drafts:
        """Return the drafts of the next step; see `DraftPlanner`."""
        drafts, gain = FixedMode.choose(self, samples, proposals, rows), self.last.speedup
        if not drafts.tokens:
            return drafts
        on, reason = self.weigh(len(samples), gain)
        if not on:
            return self.plain(reason, gain)
        self.last = replace(self.last, reason=reason)
        drafts.saved = self.last.saved
        return drafts

    def passes(self, batch: DraftableBatch, acceptance: Floats, pass_time: StepTimeEstimator) -> DraftLengths:
        """Return the draft cap for the samples without a better proposal, if it pays; else nothing."""
        made = FixedMode.passes(self, batch, acceptance, pass_time)
        if not made.tokens.any():
            return made
        gain = predicted_gain(batch, made.tokens, acceptance, self.step_time, pass_time)
        if self.pays(len(made.tokens), gain):
            return replace(made, gain=gain)
        return DraftLengths(np.zeros_like(made.tokens))
