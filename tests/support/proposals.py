"""Proposals for tests: written one by one, handed over as drafters do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import mul
from typing import NamedTuple

import numpy as np

from services.generation.speculation.drafter import Proposal, Proposals
from services.generation.speculation.plan import Drafts


class Draft(NamedTuple):
    """Tokens to verify for a sample, the drafter that proposed them, and their origin in results."""

    drafter: str
    tokens: list[int]
    source: str


def by_sample(drafts: Drafts) -> dict[str, Draft]:
    """Return the drafts of a step one by one, by sample id."""
    return {
        sample_id: Draft(drafts.origins[sample_id][0], tokens, drafts.origins[sample_id][1])
        for sample_id, tokens in drafts.tokens.items()
    }


def batched(made: Mapping[str, Sequence[Proposal | None]]) -> dict[str, Proposals]:
    """Of each drafter, one proposal or None per sample."""
    return {name: Proposals.of(proposals) for name, proposals in made.items()}


def expected_tokens(proposal: Proposal) -> float:
    """Return the expected number of accepted tokens: the sum of the survival products."""
    return sum(accumulate(proposal.acceptance, mul))


def unbatched(proposals: Proposals | None, samples: int) -> list[Proposal | None]:
    """One proposal or None per sample."""
    return [None if proposals is None else proposal_of(proposals, i) for i in range(samples)]


def proposal_of(proposals: Proposals, i: int) -> Proposal | None:
    """Return the proposal for sample i."""
    length = int(np.cumprod(proposals.acceptance[i] > 0).sum())
    if not length:
        return None
    source = proposals.sources[i] if proposals.sources else ""
    return Proposal(proposals.tokens[i, :length].tolist(), proposals.acceptance[i, :length].tolist(), source)
