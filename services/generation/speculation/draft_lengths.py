"""Choose for which samples a draft model runs, and for how many steps. Pure.

A draft model costs one draft step per position, however few samples use it. So one depth k is chosen for all
samples that it drafts for, which are those that gain over their other proposals. All depths are compared by the
predicted rate

    (samples + expected accepted tokens) / (predicted step + k predicted passes),

EfficientRollout's speedup (equation 1) for a batch in which only some samples are drafted for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike

from services.generation.speculation.drafter import Proposals, Samples
from services.generation.speculation.plan import best_proposals, context_of, rooms
from services.generation.speculation.selection.selection import Floats, Ints, survivals
from services.step_time.estimator import StepTimeEstimator

# Time of a pass before one was measured, in plain steps.
_ASSUMED_PASS = 0.5


@dataclass(frozen=True, slots=True)
class DraftableBatch:
    """The samples of a step [n]: the most tokens to draft for each, and what they verify without the draft model.

    `rows` are the draft tokens of other drafters that they verify, `expected` how many of those are accepted.
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
        """Return the batch with the best of the other proposals for each sample, as far as they are worth it.

        A token is if its survival is at least the tokens that plain decoding makes in the time of one more verified
        token.

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


def pass_seconds(pass_time: StepTimeEstimator, samples: int, context: float, plain: float) -> float:
    """Return the seconds of a pass of a draft model for so many samples with so much context together.

    Before the first was measured, half of a plain step, which takes `plain` seconds, is assumed: what is taken for
    dear would never be measured.
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
        acceptance: as `choose_lengths` has it, of as many positions as the longest draft at least.
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
