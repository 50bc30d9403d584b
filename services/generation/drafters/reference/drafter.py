"""Drafter `reference`: proposes the tokens of a complete earlier rollout of the same prompt and seed.

Under coupled sampling the reference token at position t is usually the token that the target draws there, so drafts
are position-aligned and survive mismatches. After a mismatch the drafter keeps its offset, with a lower acceptance
estimate until tokens match again, or re-aligns: to the place near the current one where the latest tokens of the
sample occur, or back to offset 0, if more of the last eight tokens match there.

A sample may have forks in addition to its reference: texts in which the policy takes the runner-up of a near-tie.
Where the response leaves the text that it follows and a fork agrees with all of the response, the sample follows
the fork from there, as a text that has never mismatched.

Acceptance depends on the number of matches since the last mismatch. It is learned by comparing every token of every
response with its reference, proposed or not, for each source separately.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from services.contracts.rollout import RolloutKind
from services.generation.draft_cache.lenient_reuse import CACHED_SOURCE
from services.generation.drafters.reference.alignment import AlignedSamples, Alignments, warm_up
from services.generation.drafters.reference.row import UNBROKEN
from services.generation.speculation.acceptance import AcceptanceTable
from services.generation.speculation.drafter import (
    DraftContext,
    DrafterSetting,
    NewRollouts,
    Proposals,
    ProposalsByName,
    Samples,
    TokenDrafter,
)
from services.platform.observability.metrics import MetricSet, counter

# First number of matches in a row of each bucket, and its prior acceptance: a text that diverged once and is
# re-aligning.
_BUCKETS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 16, 32, UNBROKEN)
_PRIORS = (0.35, 0.55, 0.7, 0.8, 0.85, 0.9, 0.92, 0.94, 0.96, 0.96, 0.96, 0.96)
# Bucket of each number of matches, up to the first of the last wide bucket.
_RAMP = np.array([bisect_right(_BUCKETS, matched) - 1 for matched in range(_BUCKETS[-2] + 1)], np.int64)
# Share of the counts learned under a policy version that is kept under the next.
_KEPT_SHARE = 0.5

Fork = NDArray[np.integer]
"""Whole text that a sample follows if it takes the runner-up; not converted, because it may be long."""


class ReferenceMetrics(MetricSet, prefix="paceline_speculation_"):
    """Metrics of samples that follow a reference."""

    forks_taken = counter("forks_taken_total", "Times that a sample left its draft at a near-tie for a fork.")


class ReferenceDrafter(TokenDrafter):
    """Follows the reference of each sample, which each proposal compares with the response."""

    name = "reference"
    uses_forks = True
    sources = (CACHED_SOURCE, *(each.value for each in RolloutKind))
    Metrics = ReferenceMetrics

    def __init__(self, on_fork: Callable[[], None] = lambda: None) -> None:
        """`on_fork` is called whenever a sample starts to follow a fork."""
        self._on_fork = on_fork
        self._alignments = Alignments(_RAMP)
        # By source, in order of first use.
        self._sources: list[str] = []
        self._tables: list[AcceptanceTable] = []
        # By sample id, the forks that the sample may still follow.
        self._forks: dict[str, list[Fork]] = {}
        # Newest policy version of any sample.
        self._version = 0

    @classmethod
    def build(cls, setting: DrafterSetting) -> Self:
        """Return the drafter of an engine. Imports numba, which vLLM must come before."""
        warm_up()
        return cls(ReferenceMetrics(setting.registry).forks_taken.inc)

    def begin(self, context: DraftContext) -> None:
        """Register the reference of a sample, if it has one."""
        if context.version > self._version:
            self._version = context.version
            for table in self._tables:
                table.fade(_KEPT_SHARE)
        if len(context.reference):
            self._follow(context.sample_id, context.reference, context.source)
            if state := context.carried.get(self.name):
                self._alignments.resume(context.sample_id, state)
            self._offer(context.sample_id, context.forks)

    def carry(self, sample_id: str) -> bytes:
        """Return the alignment of a sample to its reference."""
        return self._alignments.state(sample_id)

    def add_rollouts(self, arrival: NewRollouts) -> None:
        """Add references of running samples; their responses are compared at the next proposal."""
        for sample_id, rollout in arrival.references.items():
            self._follow(sample_id, rollout.tokens, rollout.kind.value)
        for sample_id, forks in arrival.forks.items():
            self._offer(sample_id, forks)

    def propose(self, samples: Samples, window: int, others: ProposalsByName) -> Proposals | None:
        """Return the next tokens of each sample's reference."""
        if not self._alignments:
            return None
        counts = np.zeros((2, len(self._tables), len(_BUCKETS)), np.int64)
        aligned = self._alignments.compare(samples, *counts)
        if self._forks:
            self._take_forks(samples, aligned)
        # The counts of all samples are added first, because a query of the tables costs more than an update.
        for table, tried, kept in zip(self._tables, *counts, strict=True):
            if tried.any():
                table.observe(slice(None), tried, kept)
        tokens = np.zeros((len(samples), window), np.int32)
        acceptance = np.zeros((len(samples), window))
        probabilities = np.array([table.probabilities for table in self._tables])
        if not self._alignments.propose(aligned, probabilities, tokens, acceptance):
            return None
        return Proposals(tokens, acceptance, self._sources_of(aligned, len(samples)))

    def end(self, sample_id: str, response: Sequence[int]) -> None:
        """Forget the reference and the forks."""
        self._alignments.forget(sample_id)
        self._forks.pop(sample_id, None)

    def _follow(self, sample_id: str, reference: ArrayLike, source: str) -> None:
        if source not in self._sources:
            self._sources.append(source)
            self._tables.append(AcceptanceTable(_PRIORS))
        self._alignments.follow(sample_id, reference, self._sources.index(source))

    def _offer(self, sample_id: str, forks: Sequence[ArrayLike]) -> None:
        """Keep the forks of a sample that has a reference, in place of earlier ones."""
        if forks and sample_id in self._alignments:
            self._forks[sample_id] = [np.asarray(fork) for fork in forks]

    def _take_forks(self, samples: Samples, aligned: AlignedSamples) -> None:
        """Let samples that have just left their reference follow a fork that agrees with their response.

        A response that agrees with no fork now never will, so its forks are forgotten.
        """
        for place in self._alignments.mismatched(aligned).tolist():
            sample = samples[place]
            forks = self._forks.get(sample.sample_id)
            if forks is None:
                continue
            response = np.asarray(sample.response, np.int64)
            n = len(response)
            left = [fork for fork in forks if len(fork) > n and np.array_equal(fork[:n], response)]
            if left:
                self._alignments.replace(sample.sample_id, left[0], n)
                self._on_fork()
            if len(left) > 1:
                self._forks[sample.sample_id] = left[1:]
            else:
                del self._forks[sample.sample_id]

    def _sources_of(self, aligned: AlignedSamples, samples: int) -> list[str]:
        """Return the source of each sample's reference; arbitrary for samples without one."""
        if len(self._sources) == 1:
            return self._sources * samples
        found = [""] * samples
        for place, source in zip(aligned.places.tolist(), self._alignments.sources(aligned), strict=True):
            found[place] = self._sources[source]
        return found
