"""What came of asking the draft store for rollouts."""

from __future__ import annotations

from dataclasses import dataclass

from services.drafts.rollout import Rollout


@dataclass(frozen=True, slots=True)
class Fetched:
    """The rollouts that arrived, and the prompts that were missed: whoever has them did not answer, or not to the
    end, so that there may be more. Of all others these are all."""

    rollouts: list[Rollout]
    missed: frozenset[str] = frozenset()
