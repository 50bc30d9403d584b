"""Mode `solver`: a table of the best draft length by batch size (ReSpec, section 5.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from services.contracts.plan_reasons import PlanReason
from services.generation.speculation.modes import FixedMode
from services.generation.speculation.plan import DraftableBatch, DraftLengths, pass_seconds
from services.generation.speculation.selection import Floats
from services.step_time.estimator import StepTimeEstimator

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
