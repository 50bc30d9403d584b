"""Rollout time with chains and with trees: a prototype of selection over the batch, by a model of step times.

All samples of an instance decode in step. In each step the nodes of all samples are ranked by their probability to
be reached and accepted, and so many are verified that (samples + expected accepted tokens) / step time is greatest,
as the planner does with chains. What is accepted then is what the recorded samples say. Nodes off the sample's own
path are taken to be as certain as those on it. Drafting costs nothing here, and attention with a mask as much as
without.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.branches.choices import CHOICES, Choices, Floats
from services.generation.speculation.batch_sizes import draft_token_counts
from services.step_time.estimator import StepTimeEstimator

_BEAM = 12
"""Nodes at a depth of a sample's tree that may be verified."""


@dataclass(frozen=True, slots=True)
class DraftedSample:
    """A sample to decode: its prompt's length, its choices, and their probabilities [depth, n, CHOICES]."""

    prompt: int
    choices: Choices
    shares: Floats

    @property
    def tokens(self) -> int:
        """Tokens that decoding brings."""
        return self.choices.ranks.shape[1]


@dataclass(frozen=True, slots=True)
class DecodedBatch:
    """A batch decoded to its end: seconds by the model of step times, steps, and draft tokens verified."""

    seconds: float
    steps: int
    verified: int


@dataclass(frozen=True, slots=True)
class DraftShape:
    """Shape of drafts: branches at each position, 1 for chains, and the depth."""

    branches: int
    depth: int


def decode(
    samples: Sequence[DraftedSample],
    shape: DraftShape,
    step_time: StepTimeEstimator,
    graphs: Sequence[int] = (),
) -> DecodedBatch:
    """Decode all samples in step; 0 branches decode plainly."""
    done = np.zeros(len(samples), np.int64)
    lengths = np.array([sample.tokens for sample in samples])
    seconds, steps, verified = 0.0, 0, 0
    while (live := np.flatnonzero(done < lengths)).size:
        context = float(sum(samples[i].prompt + 1 + done[i] for i in live))
        survival, on_path = _nodes([samples[i] for i in live], done[live], shape)
        ranked = np.sort(survival.ravel())[::-1]
        ranked = ranked[ranked > 0]
        counts = draft_token_counts(len(live), len(ranked), tuple(graphs))
        times = step_time.predict(len(live), len(live) + counts, context)
        reached = np.concatenate(([0.0], np.cumsum(ranked)))
        best = int(np.argmax((len(live) + reached[counts]) / times))
        count = int(counts[best])
        if count:
            kept = on_path & (survival >= ranked[count - 1])
            done[live] += kept.sum((1, 2))
        done[live] = np.minimum(done[live] + 1, lengths[live])
        seconds, steps, verified = seconds + float(times[best]), steps + 1, verified + count
    return DecodedBatch(seconds, steps, verified)


def _nodes(
    samples: Sequence[DraftedSample], done: NDArray[np.int64], shape: DraftShape
) -> tuple[Floats, NDArray[np.bool_]]:
    """Return survival and whether it is the sample's own, of the likeliest nodes [samples, depth, beam].

    Survival falls along a path, so the nodes above any value make a tree.
    """
    n, width = len(samples), max(shape.branches, 1)
    survival = np.zeros((n, shape.depth, _BEAM))
    on_path = np.zeros((n, shape.depth, _BEAM), np.bool_)
    if not shape.branches:
        return survival, on_path
    parents, own = np.ones((n, 1)), np.ones((n, 1), np.bool_)
    for depth in range(shape.depth):
        shares, ranks = _at(samples, done, depth)
        children = (parents[:, :, None] * shares[:, None, :width]).reshape(n, -1)
        theirs = (own[:, :, None] & (ranks[:, None, None] == np.arange(width))).reshape(n, -1)
        order = np.argsort(-children, axis=1, kind="stable")[:, :_BEAM]
        parents, own = np.take_along_axis(children, order, 1), np.take_along_axis(theirs, order, 1)
        survival[:, depth, : parents.shape[1]], on_path[:, depth, : own.shape[1]] = parents, own
    return survival, on_path


def _at(
    samples: Sequence[DraftedSample], done: NDArray[np.int64], depth: int
) -> tuple[Floats, NDArray[np.int64]]:
    """Return the shares [n, CHOICES] and the rank [n] of the token at a depth of each sample's draft."""
    shares, ranks = np.zeros((len(samples), CHOICES)), np.full(len(samples), CHOICES)
    for i, sample in enumerate(samples):
        at = int(done[i]) + depth
        if at < sample.tokens:
            place = min(depth, len(sample.choices.ranks) - 1)
            shares[i], ranks[i] = sample.shares[place, at], sample.choices.ranks[place, at]
    return shares, ranks
