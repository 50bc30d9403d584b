"""The `given` drafter: a guess of a whole response, such as the pre-generated rollout of the sample's own seed.

The sequence is position-aligned: with shared noise, its token at a position is what the target samples there
too, most of the time. After a mismatch it is not thrown away: it is followed at the same offset, with a lower
prediction until tokens match again, or realigned: to where the latest tokens of the sample occur in it near the
current place, unless only they look alike and more of those before them matched where it was; or back to the same
positions, where the noise is coupled, when more of the latest tokens match there.

How likely its next token is depends on how long ago the last one mismatched; that is learned by comparing every
token of every response with its sequence, whether it was offered or not, for each source apart.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from services.generation.drafting.acceptance import AcceptanceTable
from services.generation.drafting.alignment import Alignments, Followed
from services.generation.drafting.alignment.row import UNBROKEN
from services.generation.drafting.drafter import Arrival, DraftContext, Offers
from services.generation.engine.types import SampleState

# First match count of each bucket, and its acceptance before anything was seen: text that diverged once and is
# finding its way back.
_BUCKETS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 16, 32, UNBROKEN)
_PRIORS = (0.35, 0.55, 0.7, 0.8, 0.85, 0.9, 0.92, 0.94, 0.96, 0.96, 0.96, 0.96)
# The bucket of each match count up to the first of the last wide one.
_RAMP = np.array([bisect_right(_BUCKETS, matched) - 1 for matched in range(_BUCKETS[-2] + 1)], np.int64)
# Of what was learned under the policy before, so much counts under the next.
_KNOWN_OF_OLD = 0.5


class GivenDrafter:
    """Follows each sample's given sequence."""

    name = "given"

    def __init__(self) -> None:
        self._alignments = Alignments(_RAMP)
        # By source, in the order in which these came.
        self._sources: list[str] = []
        self._tables: list[AcceptanceTable] = []
        # The newest policy version that a sample came with.
        self._version = 0

    def begin(self, context: DraftContext) -> None:
        """Take the given sequence of a sample, where it has one."""
        if context.version > self._version:
            self._version = context.version
            for table in self._tables:
                table.fade(_KNOWN_OF_OLD)
        if len(context.given):
            self._follow(context.sample_id, context.given, context.source)
            if state := context.carried.get(self.name):
                self._alignments.go_on(context.sample_id, state)

    def carry(self, sample_id: str) -> bytes:
        """Where a sample lies along its sequence."""
        return self._alignments.state(sample_id)

    def adopt(self, arrival: Arrival) -> None:
        """Take sequences that came late; what there is of the response is compared with the next offer."""
        for sample_id, rollout in arrival.given.items():
            self._follow(sample_id, rollout.tokens, rollout.kind.value)

    def offer(self, samples: Sequence[SampleState], window: int) -> Offers | None:
        """The next tokens of each sample's given sequence."""
        if not self._alignments:
            return None
        counts = np.zeros((2, len(self._tables), len(_BUCKETS)), np.int64)
        followed = self._alignments.compare(samples, *counts)
        # What all samples' tokens say of the tables comes first: to ask these takes longer than to tell them.
        for table, tried, kept in zip(self._tables, *counts, strict=True):
            table.observe_all(tried, kept)
        tokens = np.zeros((len(samples), window), np.int32)
        acceptance = np.zeros((len(samples), window))
        probabilities = np.array([table.probabilities for table in self._tables])
        if not self._alignments.offer(followed, probabilities, tokens, acceptance):
            return None
        return Offers(tokens, acceptance, self._sources_of(followed, len(samples)))

    def learn(self, sample_id: str, drafted: int, accepted: int) -> None:
        """Nothing: the next offer sees the tokens themselves."""

    def end(self, sample_id: str, response: Sequence[int]) -> None:
        """Forget the sequence."""
        self._alignments.forget(sample_id)

    def tend(self) -> bool:
        """Nothing to do."""
        return False

    def _follow(self, sample_id: str, given: ArrayLike, source: str) -> None:
        if source not in self._sources:
            self._sources.append(source)
            self._tables.append(AcceptanceTable(_PRIORS))
        self._alignments.follow(sample_id, given, self._sources.index(source))

    def _sources_of(self, followed: Followed, samples: int) -> list[str]:
        """The source of each sample's sequence; what those without one are told to have does not matter."""
        if len(self._sources) == 1:
            return self._sources * samples
        found = [""] * samples
        for place, source in zip(followed.places.tolist(), self._alignments.sources(followed), strict=True):
            found[place] = self._sources[source]
        return found
