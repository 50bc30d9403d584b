"""Proposals for tests: written one by one, handed over as drafters do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import mul

from services.generation.speculation.drafter import Proposal, Proposals


def batched(made: Mapping[str, Sequence[Proposal | None]]) -> dict[str, Proposals]:
    """Of each drafter, one proposal or None per sample."""
    return {name: Proposals.of(proposals) for name, proposals in made.items()}


def expected_tokens(proposal: Proposal) -> float:
    """Return the expected number of accepted tokens: the sum of the survival products."""
    return sum(accumulate(proposal.acceptance, mul))


def unbatched(proposals: Proposals | None, samples: int) -> list[Proposal | None]:
    """One proposal or None per sample."""
    return [None] * samples if proposals is None else [proposals[i] for i in range(len(proposals))]
