"""Adaptive draft length at step boundaries, after EfficientRollout (section 4.3). Pure.

The cap on draft lengths moves along a ladder of lengths. The measured block efficiency of a step is compared with
the most that its drafts could have given, drafted + 1 for each verification: near that ceiling the cap goes up, far
below it goes down, and only after some steps in a row have said the same.

The paper's ceiling is the cap + 1, because it drafts that many tokens always. Under a planner that drafts fewer
where fewer pay, the ceiling is what was drafted; and a cap that drafts do not come near is not raised.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from services.policy.knobs import LadderKnobs

LEAST_VERIFICATIONS = 16
"""A step with fewer verifications says nothing."""
# The cap binds when drafts are at least this share of it long, on average.
_BINDS = 0.5


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What became of the drafts of a step: verifications, tokens drafted and accepted in them."""

    verifications: int
    drafted: int
    accepted: int

    @property
    def block_efficiency(self) -> float:
        """Tokens per verification: accepted + 1; 1 without any."""
        return 1.0 + self.accepted / self.verifications if self.verifications else 1.0

    @property
    def fullness(self) -> float:
        """Block efficiency over its ceiling, 0 to 1; 1 when nothing was drafted."""
        ceiling = self.drafted + self.verifications
        return (self.accepted + self.verifications) / ceiling if ceiling else 1.0

    def __add__(self, other: Acceptance) -> Acceptance:
        return Acceptance(
            self.verifications + other.verifications,
            self.drafted + other.drafted,
            self.accepted + other.accepted,
        )


@dataclass(frozen=True, slots=True)
class Rung:
    """Where a run stands on the ladder: its cap, and how many steps in a row have asked for the same move.

    `streak` is positive for steps that asked for more, negative for less.
    """

    cap: int
    streak: int = 0


@dataclass(frozen=True, slots=True)
class Move:
    """Where a step has led to, and why."""

    rung: Rung
    moved: bool
    reason: str


def start(knobs: LadderKnobs, draft_cap: int) -> Rung:
    """The first rung: the greatest length that is not above the cap, or else the least."""
    return Rung(max((each for each in knobs.lengths if each <= draft_cap), default=knobs.lengths[0]))


def climb(knobs: LadderKnobs, rung: Rung, step: Acceptance) -> Move:
    """What a finished step does to the cap.

    Args:
        knobs: the ladder; a cap that is not on it (it was changed) is first brought onto it.
        rung: where the run stands.
        step: what became of the step's drafts.
    """
    if rung.cap not in knobs.lengths:
        rung = start(knobs, rung.cap)
    if step.verifications < LEAST_VERIFICATIONS:
        return Move(rung, False, f"{step.verifications} verifications say nothing")
    place, full = knobs.lengths.index(rung.cap), step.fullness
    said = f"block efficiency {step.block_efficiency:.2f} is {full:.0%} of its ceiling"
    side = _side(knobs, rung, step)
    if side == 0:
        return Move(replace(rung, streak=0), False, said)
    streak = rung.streak + side if rung.streak * side > 0 else side
    to = place + side
    if not 0 <= to < len(knobs.lengths):
        return Move(replace(rung, streak=0), False, f"{said}; the ladder ends at {rung.cap}")
    if abs(streak) < knobs.patience:
        return Move(replace(rung, streak=streak), False, f"{said}; {abs(streak)} of {knobs.patience} steps")
    return Move(Rung(knobs.lengths[to]), True, f"{said} in {abs(streak)} steps")


def _side(knobs: LadderKnobs, rung: Rung, step: Acceptance) -> int:
    binds = step.drafted >= _BINDS * rung.cap * step.verifications
    if step.fullness >= knobs.up and binds:
        return 1
    return -1 if step.fullness <= knobs.down else 0
