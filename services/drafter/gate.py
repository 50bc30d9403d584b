"""Whether a trained drafter is published. Pure.

Candidate and drafter in use are measured on the same held-out rollouts, with the same policy: tokens a
verification, the accepted ones and the one that the policy adds. The candidate must be better by a margin, and
on enough rollouts; the margin is what keeps two drafters of the same worth from being swapped for each other.
Without a drafter in use (a fresh head that was never published) a candidate must be better than none, which
makes one token a verification. After a roll-back some updates pass before anything is published again.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """What becomes of a candidate."""

    PUBLISH = "publish"
    REJECT = "reject"
    WAIT = "wait"
    """It cannot be judged, or not yet: neither published nor counted as rejected."""


@dataclass(frozen=True, slots=True)
class GateRules:
    """`margin`: by which share of the acceptance length of the one in use the candidate must be better.
    `least_first`: acceptance length that the first one must have. `least_rollouts`: held-out rollouts below
    which nothing is judged. `rest`: updates after a roll-back in which nothing is published."""

    margin: float = 0.01
    least_first: float = 1.1
    least_rollouts: int = 8
    rest: int = 3


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict, why, and the gain in acceptance length as a share (0 where there is nothing to compare with)."""

    verdict: Verdict
    reason: str
    gain: float = 0.0


def judge(
    candidate: float, current: float | None, rollouts: int, since_roll_back: int | None, rules: GateRules
) -> Judgement:
    """Judges a candidate.

    Args:
        candidate: its acceptance length on the held-out rollouts.
        current: that of the drafter in use, on the same; None: there is none.
        rollouts: how many they were.
        since_roll_back: updates since the last roll-back; None: there was none.
    """
    if rollouts < rules.least_rollouts:
        return Judgement(
            Verdict.WAIT, f"{rollouts} held-out rollouts are too few, {rules.least_rollouts} needed"
        )
    if since_roll_back is not None and since_roll_back <= rules.rest:
        return Judgement(
            Verdict.WAIT, f"update {since_roll_back} of {rules.rest} that pass after a roll-back"
        )
    # Not "candidate < bound": a length that is no number must not pass.
    if current is None:
        if not candidate >= rules.least_first:
            return Judgement(
                Verdict.REJECT, f"acceptance length {candidate:.3f}, the first needs {rules.least_first:.3f}"
            )
        return Judgement(Verdict.PUBLISH, f"the first one: acceptance length {candidate:.3f}", candidate - 1)
    gain = candidate / current - 1 if current > 0 else 0.0
    said = f"acceptance length {candidate:.3f} on {rollouts} held-out rollouts, {current:.3f} in use"
    if not candidate >= current * (1 + rules.margin):
        return Judgement(Verdict.REJECT, f"{said}: not better by {rules.margin:.1%}", gain)
    return Judgement(Verdict.PUBLISH, said, gain)


class Loading(StrEnum):
    """How the instances take a published drafter."""

    PENDING = "pending"
    LOADED = "loaded"
    REFUSED = "refused"


def judge_loading(loaded: int, refused: int, pending: int) -> Loading:
    """What instances' answers say of a checkpoint. One that as many or more instances refuse as take it is refused:
    they have read it, and say that it is no drafter for their policy. Whoever has not answered is waited for."""
    if refused and refused >= loaded + pending:
        return Loading.REFUSED
    return Loading.LOADED if loaded and not pending else Loading.PENDING
