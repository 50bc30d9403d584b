"""Decisions of the learner, in words. Pure."""

from __future__ import annotations

from services.drafter.gate import Judgement
from services.drafter.messages import Compared
from services.drafter.record import Published
from services.platform.decisions import Decision

PUBLISHED, REJECTED, ROLLED_BACK = "drafter_published", "drafter_rejected", "drafter_rolled_back"
"""Kinds."""


def given(new: Published, now: float) -> Decision:
    """The drafter that the service was given is the first one."""
    return Decision(
        PUBLISHED, "given at the start", details={"version": new.version, "path": new.path}, time=now
    )


def published(new: Published, judgement: Judgement, compared: Compared, updates: int, now: float) -> Decision:
    """A candidate is better than the one in use."""
    details = {"version": new.version, "path": new.path, "sha256": new.sha256, "update": updates}
    details |= _figures(compared) | {"policy_version": new.policy_version}
    return Decision(PUBLISHED, judgement.reason, judgement.gain, details, now)


def rejected(judgement: Judgement, compared: Compared, version: int, updates: int, now: float) -> Decision:
    """It is not."""
    details = {"version_in_use": version, "update": updates, **_figures(compared)}
    return Decision(REJECTED, judgement.reason, 0.0, details, now)


def rolled_back(left: Published, back: Published | None, cause: str, reason: str, now: float) -> Decision:
    """The drafter in use was left for the one before; without one it stays, and that is said."""
    if back is None:
        reason += "; there is none to go back to"
    details = {"version": left.version, "back_to": back.version if back is not None else 0, "cause": cause}
    return Decision(ROLLED_BACK, reason, 0.0, details, now)


def _figures(compared: Compared) -> dict[str, float | int | None]:
    return {
        "candidate_acceptance_length": round(compared.candidate, 4),
        "current_acceptance_length": None if compared.current is None else round(compared.current, 4),
        "held_out_samples": compared.samples,
    }
