"""Drafter `suffix` with branches: alternatives that the index has for some tokens of a continuation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

import numpy as np

from services.generation.drafters.suffix import SuffixDrafter, spread
from services.generation.experiments.trees.planning import ProposedBranches, TreeProposals, warm_up
from services.generation.speculation.drafter import DrafterSetting, Proposals

if TYPE_CHECKING:
    from kernels.suffix_index import Continuations


class ForkingSuffixDrafter(SuffixDrafter):
    """Drafter `suffix` that proposes at most `alternatives` alternatives in addition to a continuation."""

    @classmethod
    def build(cls, setting: DrafterSetting) -> Self:
        """Return the drafter of an engine. Imports numba, which vLLM must come before."""
        from kernels.suffix_index import warm_up as warm_up_index

        made = super().build(setting)
        made.alternatives = setting.config.max_branches
        warm_up_index(made.alternatives)
        warm_up()
        return made

    def proposals(self, found: Continuations, rows: Sequence[int] | None, count: int) -> Proposals:
        """Return proposals with branches for `count` samples, of which the ones at `rows` have continuations."""
        made, own = super().proposals(found, rows, count), found.branches
        if own is None:
            return made
        branches = ProposedBranches(
            spread(own.tokens, rows, count, np.int32),
            spread(own.shares, rows, count, np.float64),
            spread(own.parents, rows, count, np.int64),
        )
        return TreeProposals(made.tokens, made.acceptance, branches=branches)
