"""Plan of a step: the draft tokens to verify for each sample, with their predictions.

`DraftPlanner` is the interface of planners, and `FixedLengthPlanner` makes the simplest plans. `choose_lengths`
plans the passes of a draft model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Self

import numpy as np
from numpy.typing import ArrayLike

from services.generation.speculation.drafter import Proposals, ProposalsByName, Samples
from services.generation.speculation.selection import Floats, Ints, survivals
from services.step_time.estimator import StepTimeEstimator

UNBOUNDED = 1 << 30
"""Sentinel: no limit on the verified tokens of a step."""
# Time of a pass before one was measured, in plain steps.
_ASSUMED_PASS = 0.5


@dataclass(slots=True)
class Drafts:
    """Drafts of a step, by sample id; samples without one decode plainly."""

    tokens: dict[str, Sequence[int]] = field(default_factory=dict)
    origins: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Drafter of each draft, and the draft's origin in results."""
    expected: float = 0.0
    """Accepted tokens that the drafters predict, of all samples together."""
    saved: float = inf
    """Predicted seconds saved over decoding as many tokens plainly; infinite if there is no prediction."""

    @property
    def count(self) -> int:
        """Draft tokens of all samples together."""
        return sum(map(len, self.tokens.values()))

    def longest(self, sample_id: str, drafted: int) -> int:
        """Return the most tokens that can be accepted of the `drafted` tokens that were verified for a sample."""
        return drafted


@dataclass(frozen=True, slots=True)
class StepShape:
    """Inputs of a step's predicted time: samples, verified tokens (rows), and context tokens of all samples."""

    requests: int
    rows: int
    context: int


class DraftPlanner:
    """Interface of a planner: chooses the drafts of each step. Methods that a planner does not need do nothing."""

    window: int
    """Most tokens of a proposal."""

    def wants(self, drafter: str, samples: Samples) -> Sequence[bool] | bool:
        """Return True if a drafter may propose for all samples, False for none, or one value per sample."""
        return True

    def plain_seconds(self, samples: int, context: int) -> float:
        """Return the predicted time of a step without drafts; 0 for a planner that predicts none."""
        return 0.0

    def choose(self, samples: Samples, proposals: ProposalsByName, rows: int = UNBOUNDED) -> Drafts:
        """Return the drafts of the next step.

        Args:
            samples: that can verify a draft, at least one.
            proposals: of each drafter that has any.
            rows: most verified tokens of the step, including one of each sample.
        """
        raise NotImplementedError

    def back_off(self, samples: Samples) -> None:
        """Record a step that is not planned because drafting backs off."""

    def stepped(self, shape: StepShape, seconds: float) -> None:
        """Learn the measured time of a step."""

    def verified(self, source: str, drafted: int, accepted: int, count: int = 1) -> None:
        """Record the outcome of `count` drafts of the last step."""


@dataclass(frozen=True)
class FixedLengthPlanner(DraftPlanner):
    """Planner with a fixed draft length: at most `window` tokens per sample and step.

    Each sample verifies its most promising proposal, cut to the window and to the sample's length limit. A proposal
    whose first token has an acceptance below `floor` is ignored, and tokens are cut from the first one whose
    survival probability is below `survival_floor`. Drafts are cut to equal lengths if the step would exceed its
    verified tokens.
    """

    window: int
    floor: float = 0.0
    survival_floor: float = 0.0

    def choose(self, samples: Samples, proposals: ProposalsByName, rows: int = UNBOUNDED) -> Drafts:
        """Return the drafts of the next step; see `DraftPlanner`."""
        if not proposals:
            return Drafts()
        survival = survivals(list(proposals.values()), rooms(samples), self.window)
        survival[survival[:, :, 0] < self.floor] = 0.0
        picks, lengths, best = best_proposals(survival, self.survival_floor)
        width, room = int(lengths.max()), max(0, rows - len(samples))
        while lengths.sum() > room:
            width -= 1
            lengths = np.minimum(lengths, width)
        return drafts(samples, proposals, picks, lengths, float(best[:, :width].sum()))


def best_proposals(survival: Floats, floor: float) -> tuple[Ints, Ints, Floats]:
    """Return for each sample [n] the drafter with the most expected tokens, their number, and their survival.

    `survival` [drafters, n, width] below `floor` does not count; the survival that is returned is [n, width].
    """
    survival = np.where(survival < floor, 0.0, survival)
    picks = survival.sum(2).argmax(0)
    best = survival[picks, np.arange(len(picks))]
    return picks, np.count_nonzero(best, axis=1), best


def rooms(samples: Samples) -> Ints:
    """Return the most draft tokens that each sample can verify, [n]."""
    return np.array([sample.room for sample in samples], np.int64)


def drafts(
    samples: Samples, proposals: ProposalsByName, picks: Ints, lengths: Ints, expected: float
) -> Drafts:
    """Return the first `lengths` [n] tokens of the proposals of each sample's drafter, at place `picks` [n]."""
    tokens, origins, cuts = dict[str, Sequence[int]](), dict[str, tuple[str, str]](), lengths.tolist()
    for place, (name, made) in enumerate(proposals.items()):
        here, own = np.flatnonzero((picks == place) & (lengths > 0)), (name, name)
        # Converted to lists all at once: indexing an array takes as long as indexing a dozen lists.
        for i, proposed in zip(here.tolist(), made.tokens[here].tolist(), strict=True):
            sample_id = samples[i].sample_id
            del proposed[cuts[i] :]
            tokens[sample_id] = proposed
            origins[sample_id] = (name, made.sources[i] or name) if made.sources else own
    return Drafts(tokens, origins, expected)


def context_of(samples: Samples) -> int:
    """Return the context length of all samples together, in tokens."""
    return sum([sample.length for sample in samples])


@dataclass(frozen=True, slots=True)
class DraftableBatch:
    """Samples of a step [n]: the most tokens to draft for each, and their verification without the draft model.

    `rows` are the draft tokens of other drafters that they verify, and `expected` the number of these that is
    accepted.
    """

    room: Ints
    rows: Floats
    expected: Floats
    context: int
    """Context length of all samples together, in tokens."""

    @classmethod
    def of(
        cls,
        samples: Samples,
        others: Sequence[Proposals],
        window: int,
        most: int,
        step_time: StepTimeEstimator,
    ) -> Self:
        """Return the batch with the best of the other proposals for each sample, cut to tokens worth verifying.

        A token is worth verifying if its survival is at least the number of tokens that plain decoding makes in the
        time of one more verified token.

        Args:
            samples: of the next step.
            others: proposals of other drafters.
            window: most tokens of a proposal.
            most: most tokens to draft for a sample.
            step_time: of the engine's step.
        """
        n, room, context = len(samples), rooms(samples), context_of(samples)
        rows, expected = np.zeros((2, n))
        if others:
            plain, more = step_time.predict(n, (n, 2 * n), context)
            _, lengths, survival = best_proposals(survivals(others, room, window), (more - plain) / plain)
            rows, expected = lengths.astype(np.float64), survival.sum(1)
        return cls(np.minimum(room, most), rows, expected, context)


@dataclass(frozen=True, slots=True)
class DraftLengths:
    """Tokens to draft for each sample [n], 0 for none, and the predicted gain as a factor."""

    tokens: Ints
    gain: float = 1.0


LengthChooser = Callable[[str, Samples, Sequence[Proposals], int, Floats, StepTimeEstimator], DraftLengths]
"""Returns how many tokens a draft model should draft for each sample of the next step.

Args: the drafter's name, the samples, the proposals of other drafters, the window (most tokens of a proposal), the
acceptance of a drafted token by position [K] if all before it were accepted, with K the most tokens to draft, and
the times of the draft model's passes.
"""


def pass_seconds(pass_time: StepTimeEstimator, samples: int, context: float, plain: float) -> float:
    """Return the seconds of a pass of a draft model for `samples` samples with `context` tokens together.

    Before the first pass was measured, half of a plain step, which takes `plain` seconds, is assumed: with a high
    assumption no pass would ever be measured.
    """
    return pass_time.seconds(samples, samples, context) if pass_time.known else _ASSUMED_PASS * plain


def choose_lengths(
    batch: DraftableBatch,
    acceptance: ArrayLike,
    step_time: StepTimeEstimator,
    pass_time: StepTimeEstimator,
    margin: float = 0.0,
) -> DraftLengths:
    """Return the depth with the best predicted rate for the samples that gain by it; no depth within the margin.

    Passes cost one draft step per position, however few samples use them. So one depth k is chosen for all samples
    that gain over their other proposals. All depths are compared by the predicted rate

        (samples + expected accepted tokens) / (predicted step + k predicted passes),

    EfficientRollout's speedup (equation 1) for a batch in which only some samples are drafted for.

    Args:
        batch: the samples of the step.
        acceptance: of a drafted token by position, if all before it were accepted [K].
        step_time: of the engine's step.
        pass_time: of a pass of the draft model (see `pass_seconds`).
        margin: least gain, as a share.
    """
    survival = np.multiply.accumulate(np.asarray(acceptance, np.float64))
    n, most = len(batch.room), len(survival)
    nothing = DraftLengths(np.zeros(n, np.int64))
    if not n or not most or not (batch.room > 0).any():
        return nothing
    own = np.concatenate(([0.0], np.cumsum(survival)))
    # [K, n]: tokens of each sample at each depth, and the accepted tokens that it gains by them.
    depths = np.arange(1, most + 1)
    lengths = np.minimum(depths[:, None], np.maximum(batch.room, 0))
    gains = own[lengths] - batch.expected
    drafted = (gains > 0) & (lengths > 0)
    tokens = n + batch.expected.sum() + np.where(drafted, gains, 0.0).sum(1)
    rows = n + batch.rows.sum() + np.where(drafted, lengths - batch.rows, 0.0).sum(1)
    tried, places = np.unique([n, n + batch.rows.sum(), *rows], return_inverse=True)
    plain, earlier, *verifying = step_time.predict(n, tried, batch.context)[places].tolist()
    number = max(int(drafted.sum(1).max()), 1)
    one_pass = pass_seconds(pass_time, number, number * batch.context / n, plain)
    rates = tokens / (np.array(verifying) + depths * one_pass)
    without = max(n / plain, (n + batch.expected.sum()) / earlier)
    depth = int(rates.argmax())
    gain = float(rates[depth]) / without
    return DraftLengths(np.where(drafted[depth], lengths[depth], 0), gain) if gain > 1 + margin else nothing


def predicted_gain(
    batch: DraftableBatch,
    lengths: Ints,
    acceptance: ArrayLike,
    step_time: StepTimeEstimator,
    pass_time: StepTimeEstimator,
) -> float:
    """Return the predicted rate with such drafts, their passes included, over that of plain decoding.

    Args:
        batch: the samples of the step.
        lengths: tokens that the draft model drafts for each [n]; 0: its other proposal is verified.
        acceptance: as in `choose_lengths`, for at least as many positions as the longest draft has.
        step_time: of the engine's step.
        pass_time: of a pass of the draft model.
    """
    n, drafted = len(lengths), lengths > 0
    own = np.concatenate(([0.0], np.cumsum(np.multiply.accumulate(np.asarray(acceptance, np.float64)))))
    tokens = n + np.where(drafted, own[lengths], batch.expected).sum()
    rows = n + np.where(drafted, lengths, batch.rows).sum()
    plain, verifying = step_time.predict(n, (n, rows), batch.context).tolist()
    number = max(int(drafted.sum()), 1)
    drafting = int(lengths.max()) * pass_seconds(pass_time, number, number * batch.context / n, plain)
    return float(tokens / n * plain / (verifying + drafting))
