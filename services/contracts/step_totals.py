"""Speculation statistics of a training step, as instances report them to the policy service. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import zip_longest

MOST_COUNTED = 16
"""Longest drafts that are counted by their length."""
StepKey = tuple[str, int]
"""(run_id, step)"""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Counts over verifications: how many there were, and the tokens drafted and accepted in them."""

    verifications: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_lengths: tuple[int, ...] = ()
    """Verifications by the number of their draft tokens, from 0 to `MOST_COUNTED`, with all longer ones."""
    accepted_lengths: tuple[int, ...] = ()
    """The same by accepted tokens."""

    @property
    def block_efficiency(self) -> float:
        """Tokens per verification: accepted + 1; 1 without any verification."""
        return 1.0 + self.accepted / self.verifications if self.verifications else 1.0

    @property
    def fullness(self) -> float:
        """Block efficiency over its ceiling, in [0, 1]; 1 if nothing was drafted."""
        ceiling = self.drafted + self.verifications
        return (self.accepted + self.verifications) / ceiling if ceiling else 1.0

    def plus(self, other: Acceptance, sign: int = 1) -> Acceptance:
        """Return the sum of both, or their difference if `sign` is -1."""
        return Acceptance(
            self.verifications + sign * other.verifications,
            self.drafted + sign * other.drafted,
            self.accepted + sign * other.accepted,
            _sums(self.drafted_lengths, other.drafted_lengths, sign),
            _sums(self.accepted_lengths, other.accepted_lengths, sign),
        )

    __add__ = plus


def _sums(one: tuple[int, ...], other: tuple[int, ...], sign: int) -> tuple[int, ...]:
    return tuple(a + sign * b for a, b in zip_longest(one, other, fillvalue=0))


@dataclass(slots=True)
class StepTotals:
    """Sums over the engine steps in which samples of a training step decoded. Times are in seconds.

    `reasons` counts engine steps by the reason of their plan, `predicted_gain` sums (predicted speedup over plain
    decoding) - 1, and `drafts` has the acceptance of each drafter.
    """

    reasons: Counter[str] = field(default_factory=Counter)
    planned_tokens: int = 0
    expected_tokens: float = 0.0
    predicted_gain: float = 0.0
    predicted_seconds: float = 0.0
    measured_seconds: float = 0.0
    drafts: dict[str, Acceptance] = field(default_factory=dict)
    mode: str = ""

    @property
    def engine_steps(self) -> int:
        """Number of engine steps."""
        return sum(self.reasons.values())

    @property
    def acceptance(self) -> Acceptance:
        """Acceptance of all drafters together."""
        return sum(self.drafts.values(), Acceptance())

    def plus(self, other: StepTotals, sign: int = 1) -> StepTotals:
        """Return the sum of both, or their difference if `sign` is -1."""
        reasons = Counter(self.reasons)
        for reason, count in other.reasons.items():
            reasons[reason] += sign * count
        nothing = Acceptance()
        return StepTotals(
            +reasons,
            self.planned_tokens + sign * other.planned_tokens,
            self.expected_tokens + sign * other.expected_tokens,
            self.predicted_gain + sign * other.predicted_gain,
            self.predicted_seconds + sign * other.predicted_seconds,
            self.measured_seconds + sign * other.measured_seconds,
            {
                name: self.drafts.get(name, nothing).plus(other.drafts.get(name, nothing), sign)
                for name in sorted({*self.drafts, *other.drafts})
            },
            self.mode or other.mode,
        )
