"""Decision of a mode about one step, with its reason and what is predicted of it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

from services.contracts.knobs import Knobs
from services.generation.speculation.draft_lengths import DraftableBatch, DraftLengths, choose_lengths
from services.generation.speculation.drafter import ProposalsByName, Samples
from services.generation.speculation.exploration import Exploration
from services.generation.speculation.plan import UNBOUNDED, Drafts, FixedLengthPlanner
from services.generation.speculation.selection.selection import Floats
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
    the proposals allowed. `seconds` is the predicted time of the step.
    """

    reason: PlanReason
    tokens: int = 0
    expected: float = 0.0
    speedup: float = 1.0
    available: float = 1.0
    seconds: float = 0.0

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

    REASONS: ClassVar[tuple[PlanReason, PlanReason]] = (PlanReason.OFF, PlanReason.FIXED)
    """Reasons of steps without and with drafts."""
    step_time: StepTimeEstimator
    knobs: Knobs
    exploration: Exploration = field(default_factory=Exploration)
    """Whoever runs the steps records them."""
    fixed: FixedLengthPlanner = field(default_factory=lambda: FixedLengthPlanner(1))
    """Floors of drafts of fixed length."""
    graphs: tuple[int, ...] = ()
    """Numbers of verified tokens for which the engine has graphs, rising."""
    last: PlanDecision = field(init=False, default=PlanDecision(PlanReason.NO_PROPOSALS))
    # Batch size in which the margin was reached and latched; 0: it is required.
    _latched: int = field(init=False, default=0)

    def choose(self, samples: Samples, proposals: ProposalsByName, rows: int = UNBOUNDED) -> Drafts:
        """Return the drafts of the next step; see `DraftPlanner`."""
        raise NotImplementedError

    def passes(self, batch: DraftableBatch, acceptance: Floats, pass_time: StepTimeEstimator) -> DraftLengths:
        """Return how many tokens a draft model should draft for each sample: those with the best predicted rate.

        Args:
            batch: the samples, and what they verify without the draft model.
            acceptance: of a drafted token by position, if all before it were accepted.
            pass_time: of the draft model's passes, each a token deeper.
        """
        return choose_lengths(batch, acceptance, self.step_time, pass_time, self.knobs.margin)

    def verified(self, drafted: int, accepted: int) -> None:
        """Learn the outcome of a draft."""

    def new_step(self) -> None:
        """Record that a step of a run begins."""

    def plain(self, reason: PlanReason, available: float = 1.0, seconds: float = 0.0) -> Drafts:
        """Decide on a plain step."""
        self.last = PlanDecision(reason, available=available, seconds=seconds)
        return Drafts()

    def draft(self, reason: PlanReason, samples: int, drafts: Drafts, plain: float, seconds: float) -> Drafts:
        """Decide on drafts for a step of so many samples, by the predicted seconds without and with them."""
        # The rate with drafts over the rate without (EfficientRollout, equation 1).
        gain = (samples + drafts.expected) / samples * plain / seconds
        self.last = PlanDecision(reason, drafts.count, drafts.expected, gain, gain, seconds)
        return drafts

    def pays(self, samples: int, speedup: float) -> bool:
        """Return True if a step of `samples` samples should verify drafts of this predicted speedup.

        With the latch, the margin is not required again once it was reached: within a step of a run the batch only
        shrinks, which only helps speculation. The latch opens when the batch grows, and a step that is predicted to
        be slower than plain decoding stays plain.
        """
        if samples > self._latched:
            self._latched = 0
        pays = speedup > 1.0 and speedup >= (1.0 if self._latched else 1.0 + self.knobs.margin)
        self._latched = (self._latched or samples) if pays and self.knobs.latch else 0
        return pays

    def weigh(self, samples: int, speedup: float) -> tuple[bool, PlanReason]:
        """Return True if a step should verify drafts of this predicted speedup, and the reason."""
        pays = self.pays(samples, speedup)
        if self.exploration.should_explore(samples, speedup, drafted=pays):
            return not pays, PlanReason.EXPLORED_PLAIN if pays else PlanReason.EXPLORED
        return pays, self.REASONS[pays]
