"""A planner that knows what comes: the bound of what choosing among the same proposals could bring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from bench.mismatch.decoding import matching
from services.generation.speculation.drafter import ProposalsByName, Samples
from services.generation.speculation.plan import UNBOUNDED, DraftPlanner, Drafts, drafts, rooms


class HindsightPlanner(DraftPlanner):
    """Verifies of each sample's proposals the one of which most is accepted, and of it no more than that."""

    def __init__(self, window: int, responses: Mapping[str, Sequence[int]]) -> None:
        """Take the responses of samples by id; the mapping may grow."""
        self.window = window
        self._responses = responses

    def choose(self, samples: Samples, proposals: ProposalsByName, rows: int = UNBOUNDED) -> Drafts:
        """Return the drafts of the next step; see `DraftPlanner`."""
        if not proposals:
            return Drafts()
        right = np.zeros((len(proposals), len(samples)), np.int64)
        for place, made in enumerate(proposals.values()):
            counts = np.count_nonzero(np.cumprod(made.acceptance > 0.0, axis=1), axis=1).tolist()
            for i, (sample, tokens) in enumerate(zip(samples, made.tokens.tolist(), strict=True)):
                rest = self._responses[sample.sample_id][len(sample.response) :]
                right[place, i] = matching(tokens[: counts[i]], rest)
        picks = right.argmax(0)
        lengths = np.minimum(right.max(0), rooms(samples))
        return drafts(samples, proposals, picks, lengths, float(lengths.sum()))
