"""Mode `solver`: a table of the best configuration by batch size, searched now and then (ReSpec, section 5.2).

ReSpec's configuration is (s, t, n): s passes of the drafter, t candidates for each position, and n draft tokens of
a sample that are verified together. Engines verify chains, so t is 1 (decision 0002). A draft model makes a token
a pass, so s is n for it; drafters that look tokens up make none, and s is 0. The passes are part of the time of a
configuration. ReSpec profiles the target and the drafter; here both have an estimator of their times.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from services.generation.engine.types import EngineSampleState
from services.generation.speculation.draft_lengths import DraftableBatch, DraftLengths
from services.generation.speculation.drafter import Proposals
from services.generation.speculation.modes.decision import PlanDecision, PlanReason, predicted
from services.generation.speculation.modes.fixed import FixedMode
from services.generation.speculation.plan import Drafts, context_of
from services.step_time.estimator import StepTimeEstimator

Floats = NDArray[np.float64]
BATCHES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Active batch sizes in a table."""
# Acceptance assumed before any draft was verified, and its weight in verified tokens.
_PRIOR, _PRIOR_TOKENS = 0.6, 16.0
# Engine steps after which the table is solved again within a step of a run.
_SOLVED_FOR = 256


@dataclass(frozen=True, slots=True)
class Row:
    """The best configuration for up to `batch` active samples, 0 for plain decoding, and its predicted speedup."""

    batch: int
    s: int = 0
    n: int = 0
    speedup: float = 1.0


def solve(
    target: StepTimeEstimator,
    acceptance: Sequence[float],
    context: float,
    *,
    drafter: StepTimeEstimator | None = None,
    batches: Sequence[int] = BATCHES,
    margin: float = 0.0,
) -> list[Row]:
    """Return the best configuration of each batch size, ascending, by exhaustive search.

    Args:
        target: step times of the target model.
        acceptance: for each position of a draft, the probability that it is accepted if all before it are; as long
            as the longest draft.
        context: mean length of a sample, in tokens.
        drafter: times of a drafter's passes; None if drafts are free.
        batches: active batch sizes.
        margin: least gain over plain decoding, as a share.
    """
    lengths = np.arange(len(acceptance) + 1)
    brought = 1.0 + np.concatenate(([0.0], np.cumsum(np.cumprod(acceptance))))
    rows = []
    for batch in sorted(batches):
        seconds = target.predict(batch, batch * (1 + lengths), batch * context)
        drafting = 0.0 if drafter is None else drafter.seconds(batch, batch, batch * context)
        gains = brought * seconds[0] / (seconds + drafting * lengths)
        n = int(np.argmax(gains))
        pays = n > 0 and gains[n] >= 1 + margin
        rows.append(Row(batch, 0 if drafter is None else n, n, float(gains[n])) if pays else Row(batch))
    return rows


@dataclass(slots=True)
class SolverMode(FixedMode):
    """Drafts of the length that the table has for the batch size, for larger ones than the table's none.

    The table is solved when a step of a run begins, and now and then within it, by the acceptance measured so far.
    Counts are halved each time, so that a length that did not pay is tried again.
    """

    table: list[Row] | None = None
    # Of each position of a draft: tokens that were reached, and those of them that were kept.
    _counts: Floats = field(init=False)
    _due: bool = True
    _age: int = 0
    _pass_time: StepTimeEstimator | None = None

    def __post_init__(self) -> None:
        self._counts = np.zeros((2, self.fixed.window))

    def decide(
        self, samples: Sequence[EngineSampleState], proposals: Mapping[str, Proposals], rows: int
    ) -> tuple[PlanDecision, Drafts]:
        """Return the decision about the next step, and its drafts."""
        row = self._row(len(samples), context_of(samples) / len(samples))
        self._age += 1
        self._due = self._age % _SOLVED_FOR == 0
        if not row.n:
            return PlanDecision(PlanReason.TABLE_PLAIN), Drafts()
        drafts = replace(self.fixed, window=row.n).choose(samples, proposals, rows)
        if not drafts:
            return PlanDecision(PlanReason.NO_PROPOSALS), drafts
        return predicted(samples, drafts, self.step_time, PlanReason.TABLE), drafts

    def passes(self, batch: DraftableBatch, acceptance: Floats, pass_time: StepTimeEstimator) -> DraftLengths:
        """Return the table's passes for the samples that have no better proposal."""
        self._pass_time = pass_time
        s = self._row(len(batch.room), batch.context / len(batch.room)).s
        lengths = FixedMode.passes(self, batch, acceptance[:s], pass_time)
        return DraftLengths(np.minimum(lengths.tokens, s))

    def new_step(self) -> None:
        """Solve the table again, because a step of a run begins."""
        self._due = True

    def verified(self, drafted: int, accepted: int) -> None:
        """Count the outcome of a draft: a position is reached if all before it were accepted."""
        self._counts[0, : min(drafted, accepted + 1)] += 1
        self._counts[1, :accepted] += 1

    def _row(self, samples: int, context: float) -> Row:
        """Return the row of the next larger batch size, which drafts no more than pays for `samples` samples."""
        if self.table is None or self._due:
            self._due = False
            reached, kept = self._counts
            acceptance, before = np.empty(len(reached)), _PRIOR
            for k in range(len(reached)):
                # Smoothed towards that of the position before.
                before = acceptance[k] = (before * _PRIOR_TOKENS + kept[k]) / (_PRIOR_TOKENS + reached[k])
            self.table = solve(
                *(self.step_time, acceptance.tolist(), context),
                drafter=self._pass_time,
                batches=sorted({*BATCHES, samples}),
                margin=self.margin,
            )
            self._counts /= 2
        place = bisect_left([row.batch for row in self.table], samples)
        return self.table[place] if place < len(self.table) else Row(samples)
