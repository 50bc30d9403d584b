"""Modes that are kept for comparison: `toggle` (EfficientRollout, 4.2), `adaptive`, and `solver` (ReSpec, 5.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from services.contracts.modes import PlanReason
from services.generation.speculation.drafter import ProposalsByName, Samples
from services.generation.speculation.modes import FixedMode
from services.generation.speculation.plan import (
    UNBOUNDED,
    DraftableBatch,
    DraftLengths,
    Drafts,
    pass_seconds,
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


# Number of drafts of one length after which the length may change.
_DRAFTS = 32
# The length rises if at least the first share of the drafts was accepted whole, and falls if less than the second
# share had more tokens accepted than the next lower length has.
_RISE, _FALL = 0.5, 0.25
# Longest draft to begin with.
_FIRST = 4


@dataclass(slots=True)
class AdaptiveMode(FixedMode):
    """Mode `adaptive`: a draft length that follows the acceptance, whatever it costs.

    The length rises to the next one of the ladder where most drafts were accepted whole, and falls where few drafts
    had a token accepted that the next lower length does not have. Between the two shares it stays, so lengths do
    not alternate: where each token is accepted with the same probability p, a length L that is left upwards has p^L
    of at least a half, and one that is left downwards to L has p^(L + 1) below a quarter, which exclude each other.
    The rule needs no step times and never decodes plainly. EfficientRollout moves its length in this way between
    the steps of a run (section 4.3, here the ladder of the policy service); serving engines do so between engine
    steps.
    """

    REASONS = (PlanReason.OFF, PlanReason.ADAPTIVE)
    # Lengths of the ladder up to the draft cap, rising; only the cap if the ladder has none.
    _lengths: tuple[int, ...] = ()
    # Place of the present length; drafts counted at it, of these the ones accepted whole, and the ones of which
    # more tokens were accepted than the next lower length has.
    _place: int = 0
    _counted: int = 0
    _whole: int = 0
    _beyond: int = 0

    def __post_init__(self) -> None:
        cap = self.knobs.draft_cap
        self._lengths = tuple(each for each in self.knobs.ladder.lengths if each <= cap) or (cap,)
        self._place = max(sum(each <= _FIRST for each in self._lengths) - 1, 0)

    def length(self, samples: int, context: float) -> int:
        """Return the present draft length."""
        return self._lengths[self._place]

    def verified(self, drafted: int, accepted: int, count: int = 1) -> None:
        """Count drafts with this outcome, unless they were shorter than the length for lack of tokens."""
        length = self._lengths[self._place]
        if drafted < length:
            return
        below = self._lengths[self._place - 1] if self._place else 0
        self._counted += count
        self._whole += count * (accepted >= length)
        self._beyond += count * (accepted > below)
        if self._counted < _DRAFTS:
            return
        if self._whole >= _RISE * self._counted:
            self._place = min(self._place + 1, len(self._lengths) - 1)
        elif self._beyond < _FALL * self._counted:
            self._place = max(self._place - 1, 0)
        self._counted = self._whole = self._beyond = 0


# Acceptance assumed before any draft was verified, and its weight in verified tokens.
_PRIOR, _PRIOR_TOKENS = 0.6, 16.0
# Number of lengths taken from a table before it is emptied within a step of a run.
_SOLVED_FOR = 256


def solve(
    samples: int,
    context: float,
    acceptance: Sequence[float] | Floats,
    step_time: StepTimeEstimator,
    pass_time: StepTimeEstimator | None = None,
) -> tuple[int, float]:
    """Return the best draft length of a batch, 0 for plain decoding, and its speedup, by exhaustive search.

    Args:
        samples: of the batch.
        context: mean length of a sample, in tokens.
        acceptance: of each position of the longest draft, if all before it are accepted.
        step_time: of the engine's step.
        pass_time: of a draft model's pass (see `pass_seconds`); None if drafts are free.
    """
    lengths = np.arange(len(acceptance) + 1)
    brought = 1.0 + np.concatenate(([0.0], np.cumsum(np.cumprod(acceptance))))
    seconds = step_time.predict(samples, samples * (1 + lengths), samples * context)
    drafting = 0.0
    if pass_time is not None:
        drafting = pass_seconds(pass_time, samples, samples * context, float(seconds[0]))
    gains = brought * seconds[0] / (seconds + drafting * lengths)
    n = int(np.argmax(gains))
    return n, float(gains[n])


@dataclass(slots=True)
class SolverMode(FixedMode):
    """Mode `solver`: a table of the best draft length by batch size, after ReSpec (section 5.2).

    ReSpec's configuration is (s, t, n): s passes of the drafter, t candidates for each position, n draft tokens of
    a sample. The mode drafts chains, so t is 1 (decision 0010). A draft model makes one token per pass, so s is n
    for it, and its passes are part of the time; drafters that look tokens up make none.

    The entry of a batch size is searched when it is first needed. The table is emptied when a step of a run begins,
    and at intervals within it, and solved by the acceptance measured until then. Counts are halved each time, so
    that a length that did not pay is tried again.
    """

    REASONS = (PlanReason.TABLE_PLAIN, PlanReason.TABLE)
    # Draft length by batch size.
    _table: dict[int, int] = field(init=False, default_factory=dict)
    # Tokens that were reached and tokens that were kept [2, positions of a draft], and the share that is kept.
    _counts: Floats = field(init=False)
    _acceptance: Floats = field(init=False)
    # Number of lengths taken from the table.
    _age: int = 0
    _pass_time: StepTimeEstimator | None = None

    def __post_init__(self) -> None:
        self._counts = np.zeros((2, self.knobs.draft_cap))

    def passes(self, batch: DraftableBatch, acceptance: Floats, pass_time: StepTimeEstimator) -> DraftLengths:
        """Return the table's length for the samples that have no better proposal."""
        self._pass_time = pass_time
        return FixedMode.passes(self, batch, acceptance, pass_time)

    def new_step(self) -> None:
        """Solve the table again, because a step of a run begins."""
        self._age = 0

    def verified(self, drafted: int, accepted: int, count: int = 1) -> None:
        """Count drafts with this outcome: a position is reached if all before it were accepted."""
        self._counts[0, : min(drafted, accepted + 1)] += count
        self._counts[1, :accepted] += count

    def length(self, samples: int, context: float) -> int:
        """Return the length that the table has for a batch; 0 if none gains the margin."""
        if not self._age:
            self._table.clear()
            self._acceptance, before = np.empty(self.knobs.draft_cap), _PRIOR
            for k, (reached, kept) in enumerate(self._counts.T):
                # Smoothed towards the acceptance of the previous position.
                before = (before * _PRIOR_TOKENS + kept) / (_PRIOR_TOKENS + reached)
                self._acceptance[k] = before
            self._counts /= 2
        self._age = (self._age + 1) % _SOLVED_FOR
        if samples not in self._table:
            n, gain = solve(samples, context, self._acceptance, self.step_time, self._pass_time)
            self._table[samples] = n if gain >= 1 + self.knobs.margin else 0
        return self._table[samples]
