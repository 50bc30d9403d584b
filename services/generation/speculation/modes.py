"""Modes of speculation: the mechanisms that choose how many draft tokens a step verifies.

`MODES` has them by the names that knobs use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from services.contracts.plan_reasons import PlanReason
from services.generation.speculation.decision import Mode
from services.generation.speculation.drafter import ProposalsByName, Samples
from services.generation.speculation.plan import (
    UNBOUNDED,
    DraftableBatch,
    DraftLengths,
    Drafts,
    add_branches,
    context_of,
    drafts,
    pass_seconds,
    predicted_gain,
    rooms,
)
from services.generation.speculation.selection.selection import (
    Floats,
    branch_survival,
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
class ToggleMode(FixedMode):
    """Mode `toggle`: drafts of fixed length in the steps in which they are predicted to pay.

    They pay where the predicted speedup over plain decoding is at least 1 + margin (the tau of EfficientRollout,
    section 4.2), with the passes of a draft model counted (equation 1). The paper keeps speculation on to the end
    of the rollout; see `Mode.pays` for the latch that is used here. In some other steps drafts are verified to
    measure them.
    """

    REASONS = (PlanReason.TOGGLED_OFF, PlanReason.TOGGLED_ON)

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

    def verified(self, drafted: int, accepted: int) -> None:
        """Count the outcome of a draft, unless it was shorter than the length for lack of tokens."""
        length = self._lengths[self._place]
        if drafted < length:
            return
        below = self._lengths[self._place - 1] if self._place else 0
        self._counted += 1
        self._whole += accepted >= length
        self._beyond += accepted > below
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

    def verified(self, drafted: int, accepted: int) -> None:
        """Count the outcome of a draft: a position is reached if all before it were accepted."""
        self._counts[0, : min(drafted, accepted + 1)] += 1
        self._counts[1, :accepted] += 1

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


@dataclass(slots=True)
class PlannerMode(Mode):
    """Mode `planner`: drafts over the whole batch that maximise the predicted tokens per second.

    For each sample the proposal is picked whose tokens are worth most above the price of a verified token; then the
    tokens of all samples, at most `draft_cap` each, are ranked by survival probability, and the number of them is
    verified for which

        (samples + expected accepted tokens) / predicted step time

    is greatest; none if they gain less than the margin. This is RLHFSpec's search (section 5.3), for chains, and
    for trees where a drafter proposes branches: survival falls along each path, so the best tokens are a tree.
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

    def choose(self, samples: Samples, proposals: ProposalsByName, rows: int = UNBOUNDED) -> Drafts:
        """Return the drafts of the next step; see `DraftPlanner`."""
        if not proposals:
            return self.plain(PlanReason.NO_PROPOSALS)
        n = len(samples)
        made, room = list(proposals.values()), rooms(samples)
        survival = survivals(made, room, self.knobs.draft_cap)
        branches = (
            branch_survival(made, room, survival) if any(each.branches is not None for each in made) else None
        )
        # Between the sizes of two graphs the number of all proposed tokens is tried as well.
        proposed = int(survival.any(0).sum()) if self.graphs else survival[0].size
        if self.graphs and branches is not None:
            proposed += int(np.count_nonzero(branches.survival))
        counts = draft_token_counts(n, max(0, min(proposed, rows - n)), self.graphs)
        seconds = self.step_time.predict(n, n + counts, context_of(samples))
        plain = float(seconds[0])
        if not plain > 0.0:
            raise ValueError(f"a plain step of {n} samples is predicted to take {plain} s")
        found = search(survival, counts, seconds, self.price, branches)
        if not found.tokens:
            return self.plain(PlanReason.NO_PROPOSALS, seconds=plain)
        rate = n / plain
        self.price = max(found.rate, rate) * found.token_seconds
        if found.rate > rate and (most := self.exploration.fewer(n, found.tokens)) < found.tokens:
            few = max(int((counts <= most).sum()), 2)
            found = search(survival, counts[:few], seconds[:few], self.price, branches)
        gain = found.rate / rate
        drafting, reason = self.weigh(n, gain)
        if not drafting:
            if reason == PlanReason.PLAIN_IS_BEST and gain > 1.0:
                reason = PlanReason.WITHIN_MARGIN
            return self.plain(reason, max(gain, 1.0), plain)
        lengths, expected, taken = cut(survival, found, branches)
        chosen = drafts(samples, proposals, found.picks, lengths, expected)
        if branches is not None and taken is not None:
            add_branches(chosen, samples, list(proposals)[branches.drafter], proposals, taken)
        self.draft(reason, n, chosen, plain, found.seconds)
        chosen.saved = self.last.saved
        return chosen


MODES: dict[str, type[Mode]] = {
    "fixed": FixedMode,
    "toggle": ToggleMode,
    "adaptive": AdaptiveMode,
    "solver": SolverMode,
    "planner": PlannerMode,
}
"""Modes by name."""
