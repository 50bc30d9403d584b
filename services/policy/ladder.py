"""Adaptive cap on draft length at step boundaries, after EfficientRollout (section 4.3). Pure.

The cap moves along a ladder of lengths. The measured block efficiency of a step is compared with its ceiling,
drafted + 1 per verification: close to the ceiling the cap rises, far below it falls, each after `patience` steps
in a row that agree.

The ceiling of the paper is the cap + 1, because it always drafts that many tokens. A planner drafts fewer where
fewer pay, so here the ceiling is what was drafted, and a cap that drafts do not come close to is not raised.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from services.contracts.knob_store import Rung
from services.contracts.knobs import LadderKnobs
from services.contracts.step_totals import Acceptance

LEAST_VERIFICATIONS = 16
"""Fewest verifications of a step for it to count."""
# The cap binds if drafts have at least this share of its length on average.
_BINDS = 0.5


@dataclass(frozen=True, slots=True)
class LadderMove:
    """Outcome of a step for the ladder, with the reason."""

    rung: Rung
    moved: bool
    reason: str


def start(knobs: LadderKnobs, draft_cap: int) -> Rung:
    """Return the first rung: the greatest length that is not above the cap, or else the least."""
    return Rung(max((each for each in knobs.lengths if each <= draft_cap), default=knobs.lengths[0]))


def climb(knobs: LadderKnobs, rung: Rung, step: Acceptance) -> LadderMove:
    """Move a run on its ladder by the acceptance of a finished step.

    Args:
        knobs: the ladder; a cap that is not on it, because it was changed, is moved onto it first.
        rung: position of the run.
        step: acceptance of the step's drafts.
    """
    if rung.cap not in knobs.lengths:
        rung = start(knobs, rung.cap)
    if step.verifications < LEAST_VERIFICATIONS:
        return LadderMove(rung, False, f"{step.verifications} verifications say nothing")
    place, full = knobs.lengths.index(rung.cap), step.fullness
    said = f"block efficiency {step.block_efficiency:.2f} is {full:.0%} of its ceiling"
    side = _side(knobs, rung, step)
    if side == 0:
        return LadderMove(replace(rung, streak=0), False, said)
    streak = rung.streak + side if rung.streak * side > 0 else side
    to = place + side
    if not 0 <= to < len(knobs.lengths):
        return LadderMove(replace(rung, streak=0), False, f"{said}; the ladder ends at {rung.cap}")
    if abs(streak) < knobs.patience:
        return LadderMove(
            replace(rung, streak=streak), False, f"{said}; {abs(streak)} of {knobs.patience} steps"
        )
    return LadderMove(Rung(knobs.lengths[to]), True, f"{said} in {abs(streak)} steps")


def _side(knobs: LadderKnobs, rung: Rung, step: Acceptance) -> int:
    binds = step.drafted >= _BINDS * rung.cap * step.verifications
    if step.fullness >= knobs.up and binds:
        return 1
    return -1 if step.fullness <= knobs.down else 0
