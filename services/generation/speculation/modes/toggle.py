"""Mode `toggle`: drafts of fixed length in the steps in which they are predicted to pay (EfficientRollout, 4.2).

Speculation is on if the predicted speedup over plain decoding is at least 1 + margin (the paper's tau). With the
latch, the margin is not required again once it was reached: within a step the batch only shrinks, which only helps
speculation. The paper keeps speculation on to the end of the rollout; here the latch opens when the batch grows,
and a step that is predicted to be slower than plain decoding stays plain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from services.generation.engine.types import EngineSampleState
from services.generation.speculation.drafter import Proposals
from services.generation.speculation.modes.decision import PlanDecision, PlanReason
from services.generation.speculation.modes.fixed import FixedMode
from services.generation.speculation.plan import Drafts


@dataclass(slots=True)
class Latch:
    """Hysteresis of the margin, step by step."""

    margin: float = 0.02
    on: bool = False
    """False: the margin is always required."""
    # Batch size in which the margin was reached; 0: it is required.
    _closed: int = 0

    def passes(self, samples: int, speedup: float) -> bool:
        """Return True if a step of `samples` samples should verify drafts of this predicted speedup."""
        if samples > self._closed:
            self._closed = 0
        drafts = speedup > 1.0 and speedup >= (1.0 if self._closed else 1.0 + self.margin)
        self._closed = (self._closed or samples) if drafts and self.on else 0
        return drafts


@dataclass(slots=True)
class ToggleMode(FixedMode):
    """Drafts of fixed length where the latch lets them pass, and in some other steps to measure them."""

    latch: Latch | None = None

    def decide(
        self, samples: Sequence[EngineSampleState], proposals: Mapping[str, Proposals], rows: int
    ) -> tuple[PlanDecision, Drafts]:
        """Return the decision about the next step, and its drafts."""
        decision, drafts = FixedMode.decide(self, samples, proposals, rows)
        if not drafts:
            return decision, drafts
        latch = self.latch = self.latch or Latch(self.margin)
        on = latch.passes(len(samples), decision.speedup)
        explored = self.exploration.should_explore(len(samples), decision.speedup, drafted=on)
        if on == explored:
            reason = PlanReason.EXPLORED_PLAIN if explored else PlanReason.TOGGLED_OFF
            return PlanDecision(reason, available=decision.speedup), Drafts()
        reason = PlanReason.EXPLORED if explored else PlanReason.TOGGLED_ON
        drafts.saved = decision.saved
        return replace(decision, reason=reason), drafts
