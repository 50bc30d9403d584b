"""Mode `solver`: a table of the best configuration by batch size, searched now and then (ReSpec, section 5.2).

ReSpec's configuration is (s, t, n): s passes of the drafter, t candidates for each position, n draft tokens of a
sample. Engines verify chains, so t is 1 (decision 0002). A draft model makes a token a pass, so s is n for it, and
its passes are part of the time; drafters that look tokens up make none.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from services.generation.speculation.draft_lengths import DraftableBatch, DraftLengths
from services.generation.speculation.modes.decision import PlanReason
from services.generation.speculation.modes.fixed import FixedMode
from services.step_time.estimator import StepTimeEstimator

Floats = NDArray[np.float64]
BATCHES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Active batch sizes in a table."""
# Acceptance assumed before any draft was verified, and its weight in verified tokens.
_PRIOR, _PRIOR_TOKENS = 0.6, 16.0
# Lengths that are taken from a table before it is solved again within a step of a run.
_SOLVED_FOR = 256


@dataclass(frozen=True, slots=True)
class Row:
    """The best configuration for up to `batch` active samples, 0 for plain decoding, and its predicted speedup."""

    batch: int
    n: int = 0
    speedup: float = 1.0


def solve(
    target: StepTimeEstimator,
    acceptance: Sequence[float] | Floats,
    context: float,
    drafter: StepTimeEstimator | None = None,
    *,
    batches: Sequence[int] = BATCHES,
    margin: float = 0.0,
) -> list[Row]:
    """Return the best configuration of each batch size, ascending, by exhaustive search.

    Args:
        acceptance: of each position of the longest draft, if all before it are accepted.
        context: mean length of a sample, in tokens.
        drafter: times of a drafter's passes; None if drafts are free.
        margin: least gain over plain decoding, as a share.
    """
    lengths = np.arange(len(acceptance) + 1)
    brought = 1.0 + np.concatenate(([0.0], np.cumsum(np.cumprod(acceptance))))
    rows = []
    for batch in sorted(batches):
        seconds = target.predict(batch, batch * (1 + lengths), batch * context)
        drafting = 0.0 if drafter is None else drafter.seconds(batch, batch, batch * context)
        gains = brought * seconds[0] / (seconds + drafting * lengths)
        n = int(np.argmax(gains)) if gains.max() >= 1 + margin else 0
        rows.append(Row(batch, n, float(gains[n])))
    return rows


@dataclass(slots=True)
class SolverMode(FixedMode):
    """Drafts of the length that the table has for the batch size.

    The table is solved when a step of a run begins, and now and then within it, by the acceptance measured so far.
    Counts are halved each time, so that a length that did not pay is tried again.
    """

    REASONS: ClassVar = (PlanReason.TABLE_PLAIN, PlanReason.TABLE)
    table: list[Row] = field(default_factory=list)
    # Of each position of a draft: tokens that were reached, and those of them that were kept.
    _counts: Floats = field(init=False)
    # Lengths taken from the table.
    _age: int = _SOLVED_FOR
    _pass_time: StepTimeEstimator | None = None

    def __post_init__(self) -> None:
        self._counts = np.zeros((2, self.fixed.window))

    def passes(self, batch: DraftableBatch, acceptance: Floats, pass_time: StepTimeEstimator) -> DraftLengths:
        """Return the table's length for the samples that have no better proposal."""
        self._pass_time = pass_time
        return FixedMode.passes(self, batch, acceptance, pass_time)

    def new_step(self) -> None:
        """Solve the table again, because a step of a run begins."""
        self._age = _SOLVED_FOR

    def verified(self, drafted: int, accepted: int) -> None:
        """Count the outcome of a draft: a position is reached if all before it were accepted."""
        self._counts[0, : min(drafted, accepted + 1)] += 1
        self._counts[1, :accepted] += 1

    def length(self, samples: int, context: float) -> int:
        """Return the length of the next larger batch size, which drafts no more than pays for `samples` samples."""
        self._age += 1
        if self._age > _SOLVED_FOR:
            self._age = 0
            reached, kept = self._counts
            acceptance, before = np.empty(len(reached)), _PRIOR
            for k in range(len(reached)):
                # Smoothed towards that of the position before.
                before = acceptance[k] = (before * _PRIOR_TOKENS + kept[k]) / (_PRIOR_TOKENS + reached[k])
            batches = sorted({*BATCHES, samples})
            self.table = solve(
                self.step_time, acceptance, context, self._pass_time, batches=batches, margin=self.margin
            )
            self._counts /= 2
        place = bisect_left([row.batch for row in self.table], samples)
        return self.table[place].n if place < len(self.table) else 0
