"""Interface between the steps of a runner and the attention of a device that computes draft trees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.generation.engine.sampling.rows import IntArray, Rows
from services.generation.engine.sampling.segments import TreeSegments


@dataclass(frozen=True, slots=True)
class BranchLayout:
    """Layout of a step of n samples in which some drafts have branches.

    `rows` and `segments` are its rows of logits, by sample and by segment. `starts` [n + 1] are the places of the
    samples' first tokens in the step, and the number of its tokens; `computed` [n] are the tokens of each sample
    whose KV was there before. `parents` are those of the drafts with branches, by the sample's place in the batch.
    """

    rows: Rows
    segments: TreeSegments
    starts: IntArray
    computed: IntArray
    parents: Mapping[int, Sequence[int]]


class BranchAttention(Protocol):
    """Attention of the branches of one step at a time. vLLM lays KV out as if every draft were a chain."""

    def begin(self, layout: BranchLayout | None) -> None:
        """Let the next forward pass compute these branches; None for a step without any."""

    def computed(self) -> None:
        """Let other forward passes than that of the step be plain; what is kept of it stays."""

    def move(self, tokens: IntArray, targets: IntArray) -> None:
        """Write KV of accepted branch tokens to the slots of others in all layers, and forget the step.

        Args:
            tokens: places in the step, [m].
            targets: places of the tokens whose slots they take, [m]: those where a chain would have them. Some may
                be sources too.
        """
