"""Decision of a mode about one step, with its reason and what is predicted of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from services.generation.engine.types import EngineSampleState
from services.generation.speculation.draft_lengths import DraftableBatch, DraftLengths, choose_lengths
from services.generation.speculation.drafter import Proposals
from services.generation.speculation.exploration import Exploration
from services.generation.speculation.plan import UNBOUNDED, Drafts, context_of
from services.step_time.estimator import StepTimeEstimator


class PlanReason(StrEnum):
    """Reason of a decision, as metrics and reports have it."""

    NO_PROPOSALS = "no_proposals"
    BACKOFF = "backoff"
    """Drafting is skipped (see `backoff`)."""
    OFF = "off"
    """The kill switch is set."""
    PLAIN_IS_BEST = "plain_is_best"
    WITHIN_MARGIN = "within_margin"
    DRAFTS = "drafts"
    EXPLORED = "explored"
    """Drafts were verified to measure the step (see `exploration`)."""
    EXPLORED_PLAIN = "explored_plain"
    """The step was done plainly to measure it."""
    FIXED = "fixed"
    ADAPTIVE = "adaptive"
    TOGGLED_ON = "toggled_on"
    TOGGLED_OFF = "toggled_off"
    TABLE = "table"
    TABLE_PLAIN = "table_plain"


@dataclass(frozen=True, slots=True)
class PlanDecision:
    """Decision about a step.

    `tokens` draft tokens are verified, of which `expected` are predicted to be accepted. `speedup` is the predicted
    rate in tokens per second over that of plain decoding, 1 for a plain step; `available` is the best speedup that
    the proposals allowed. `seconds` is the predicted time of the step, `context` its context in tokens.
    """

    reason: PlanReason
    tokens: int = 0
    expected: float = 0.0
    speedup: float = 1.0
    available: float = 1.0
    seconds: float = 0.0
    context: int = 0

    @property
    def saved(self) -> float:
        """Predicted seconds saved over decoding as many tokens plainly."""
        return (self.speedup - 1.0) * self.seconds


@dataclass(slots=True)
class Mode:
    """Mode of speculation: decides on the drafts of each step and keeps its last decision.

    Modes share the estimator and the exploration of their engine. A decision may be made before the
    steps before it are measured.
    """

    step_time: StepTimeEstimator
    margin: float = 0.0
    """Least gain over plain decoding, as a share."""
    exploration: Exploration = field(default_factory=Exploration)
    """Whoever runs the steps records them."""
    last: PlanDecision = field(init=False, default=PlanDecision(PlanReason.NO_PROPOSALS))

    def choose(
        self, samples: Sequence[EngineSampleState], proposals: Mapping[str, Proposals], rows: int = UNBOUNDED
    ) -> Drafts:
        """Return the drafts of the next step; see `DraftPlanner`."""
        self.last, drafts = self.decide(samples, proposals, rows)
        return drafts

    def decide(
        self, samples: Sequence[EngineSampleState], proposals: Mapping[str, Proposals], rows: int
    ) -> tuple[PlanDecision, Drafts]:
        """Return the decision about the next step, and its drafts."""
        raise NotImplementedError

    def passes(
        self, batch: DraftableBatch, acceptance: NDArray[np.float64], pass_time: StepTimeEstimator
    ) -> DraftLengths:
        """Return how many tokens a draft model should draft for each sample: those with the best predicted rate.

        Args:
            batch: the samples, and what they verify without the draft model.
            acceptance: of a drafted token by position, if all before it were accepted.
            pass_time: of the draft model's passes, each a token deeper.
        """
        return choose_lengths(batch, acceptance, self.step_time, pass_time, self.margin)

    def verified(self, drafted: int, accepted: int) -> None:
        """Learn the outcome of a draft."""

    def new_step(self) -> None:
        """Record that a step of a run begins."""


def speedup(samples: int, expected: float, plain_seconds: float, seconds: float) -> float:
    """Return the rate with drafts over the rate without, in tokens per second (EfficientRollout, equation 1).

    Args:
        samples: of the step; each gets one token in any case.
        expected: draft tokens predicted to be accepted, over all samples.
        plain_seconds: predicted time of the step without drafts.
        seconds: predicted time of the step that verifies them, and to make them.
    """
    if samples < 1 or seconds <= 0.0 or plain_seconds <= 0.0:
        return 1.0
    return (samples + expected) / samples * plain_seconds / seconds


def predicted(
    samples: Sequence[EngineSampleState], drafts: Drafts, step_time: StepTimeEstimator, reason: PlanReason
) -> PlanDecision:
    """Return the decision to verify these drafts, by the drafters' predictions and the estimated step times."""
    tokens, expected, n = drafts.count, drafts.expected, len(samples)
    context = context_of(samples)
    plain, drafted = step_time.predict(n, (n, n + tokens), context).tolist()
    gain = speedup(n, expected, plain, drafted)
    return PlanDecision(reason, tokens, expected, gain, gain, drafted, context)
