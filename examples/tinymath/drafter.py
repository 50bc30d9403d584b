"""Figures for the report about the platform's decisions on the online drafter. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline import Decision

KINDS = ("drafter_published", "drafter_rejected")


@dataclass(frozen=True, slots=True)
class HeldOutComparison:
    """One candidate beside the drafter in use, on the same held-out samples: tokens a verification."""

    update: int
    candidate: float
    current: float | None
    """None: nothing was in use."""
    published: bool


def comparisons(decisions: Sequence[Decision]) -> list[HeldOutComparison]:
    """Return the candidates that were judged, in order of their updates."""
    found = []
    for each in decisions:
        details = each.details
        if each.kind not in KINDS or "candidate_acceptance_length" not in details:
            continue
        current = details.get("current_acceptance_length")
        found.append(
            HeldOutComparison(
                int(details["update"]),
                float(details["candidate_acceptance_length"]),
                None if current is None else float(current),
                each.kind == KINDS[0],
            )
        )
    return sorted(found, key=lambda each: each.update)
