"""Decision of a mode about one step, with its reason, and the exploration of other ways of decoding. Pure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from math import inf
from typing import ClassVar

from services.contracts.knobs import Knobs
from services.contracts.modes import PlanReason
from services.generation.speculation.drafter import ProposalsByName, Samples
from services.generation.speculation.plan import (
    UNBOUNDED,
    DraftableBatch,
    DraftLengths,
    Drafts,
    FixedLengthPlanner,
    choose_lengths,
)
from services.generation.speculation.selection import Floats
from services.step_time.estimator import StepTimeEstimator

# Steps until the first exploration and between later ones, for rates within this share of each other.
_FIRST_INTERVAL, _MAX_INTERVAL = 8, 64
_CLOSE = 0.1
# Plain steps after which the first drafts in a batch of a new size are explored.
_UNTRIED = 8
# Predicted speedups between which plain and drafted steps are explored; beyond them the decision is clear.
_MIN_SPEEDUP, _MAX_SPEEDUP = 0.85, 1.3
# Share of the draft tokens that an exploration of fewer verifies.
_FEWER = 0.5


@dataclass(slots=True)
class _Count:
    """Steps since the last plain one, the last drafted one, and the last with fewer tokens; and their intervals."""

    interval: int = _FIRST_INTERVAL
    plain: float = inf
    drafted: int = 0
    tried: bool = False
    fewer: int = 0
    fewer_interval: int = _FIRST_INTERVAL


@dataclass(slots=True)
class Exploration:
    """Schedule of explorations, by octave of batch sizes.

    The estimator learns from the steps that are done. If it overestimates verification, it never sees a drafted
    step that would prove it wrong; if it underestimates it, it never sees a plain step to compare with, and it
    never sees another number of draft tokens than the best. So other ways of decoding are tried at intervals: short
    at first, longer later, and the longer the further apart their predicted rates are, so that the predicted cost
    of exploration stays a small share.

    The first drafts in a batch of a new size wait until a plain step was done, because drafts can only be judged by
    comparison with it. If no drafts were verified after eight plain steps, some are verified once, whatever their
    prediction: the prediction of the sweep for long contexts may be off by any factor, because its own contexts are
    short.
    """

    _counts: defaultdict[int, _Count] = field(default_factory=lambda: defaultdict(_Count))

    def should_explore(self, num_samples: int, speedup: float, *, drafted: bool) -> bool:
        """Return True if the step should be done in the other way; it then counts as an exploration.

        Args:
            num_samples: samples of the step.
            speedup: predicted rate of the best drafts over that of plain decoding.
            drafted: the decision without exploration: True for drafts.
        """
        count = self._counts[num_samples.bit_length()]
        since = count.plain if drafted else count.drafted
        if since == inf:
            return True
        if not drafted and not count.tried:
            return since >= _UNTRIED
        doubtful = _MIN_SPEEDUP <= speedup <= _MAX_SPEEDUP
        if not doubtful or since < count.interval * max(1.0, abs(speedup - 1) / _CLOSE):
            return False
        count.interval = min(2 * count.interval, _MAX_INTERVAL)
        return True

    def fewer(self, num_samples: int, tokens: int) -> int:
        """Return how many of `tokens` draft tokens a step should verify at most: all, or at intervals half."""
        count = self._counts[num_samples.bit_length()]
        if count.fewer < count.fewer_interval:
            return tokens
        count.fewer, count.fewer_interval = 0, min(2 * count.fewer_interval, _MAX_INTERVAL)
        return max(1, int(_FEWER * tokens))

    def record_step(self, num_samples: int, *, drafted: bool) -> None:
        """Count a step that was done with or without drafts."""
        count = self._counts[num_samples.bit_length()]
        count.plain = count.plain + 1 if drafted else 0
        count.drafted = 0 if drafted else count.drafted + 1
        count.fewer += drafted
        count.tried |= drafted


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

    Modes share the estimator and the exploration of their engine. A decision may be made before the previous steps
    are measured.
    """

    REASONS: ClassVar[tuple[PlanReason, PlanReason]] = (PlanReason.OFF, PlanReason.FIXED)
    """Reasons of steps without and with drafts."""
    SWITCHES: ClassVar[bool] = False
    """True if a change between the two is reported as a switch of speculation."""
    step_time: StepTimeEstimator
    knobs: Knobs
    exploration: Exploration = field(default_factory=Exploration)
    """Schedule of explorations; the caller that runs the steps records them."""
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
            batch: the samples, and their verification without the draft model.
            acceptance: of a drafted token by position, if all before it were accepted.
            pass_time: of the draft model's passes, each a token deeper.
        """
        return choose_lengths(batch, acceptance, self.step_time, pass_time, self.knobs.margin)

    def verified(self, drafted: int, accepted: int, count: int = 1) -> None:
        """Learn the outcome of `count` drafts."""

    def new_step(self) -> None:
        """Record that a step of a run begins."""

    def plain(self, reason: PlanReason, available: float = 1.0, seconds: float = 0.0) -> Drafts:
        """Decide on a plain step."""
        self.last = PlanDecision(reason, available=available, seconds=seconds)
        return Drafts()

    def draft(self, reason: PlanReason, samples: int, drafts: Drafts, plain: float, seconds: float) -> Drafts:
        """Decide on drafts for a step of `samples` samples, by the predicted seconds without and with them."""
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
