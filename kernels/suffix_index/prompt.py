"""One prompt of the index: its texts, its automaton, and their cost."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kernels.suffix_index.compiled.layout import HISTORY, NOWHERE
from kernels.suffix_index.names import Name

TEXT_COST = 16
"""Cost of a prompt or rollout beside its tokens, so that empty ones are bounded, too."""


@dataclass(frozen=True, slots=True, eq=False)
class IndexedRollout:
    """Rollout that no longer grows."""

    version: int
    tokens: NDArray[np.int32]

    @property
    def cost(self) -> int:
        """Cost against the bound, in tokens."""
        return len(self.tokens) + TEXT_COST


@dataclass(frozen=True, slots=True)
class GrowingRollout:
    """Growing rollout: its prompt, its name and its version."""

    prompt: Name
    rollout: Name
    version: int


@dataclass(slots=True, eq=False)
class IndexedPrompt:
    """Texts of a prompt and its automaton.

    `root` is NOWHERE while the automaton has to be rebuilt; `end` is the state where the prompt ends. Rollouts of
    version `base` weigh 1. `hashes` [HISTORY] and `hashed` are those behind the prompt. `growing` holds handles.
    """

    base: int = 0
    tokens: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    rollouts: dict[Name, IndexedRollout] = field(default_factory=dict)
    growing: dict[Name, int] = field(default_factory=dict)
    root: int = NOWHERE
    end: int = NOWHERE
    hashes: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(HISTORY, np.uint64))
    hashed: int = 0

    @property
    def built(self) -> bool:
        """True if the automaton is built."""
        return self.root != NOWHERE

    @property
    def empty(self) -> bool:
        """True if it has no tokens and no rollouts."""
        return not (self.growing or self.rollouts or len(self.tokens))

    @property
    def fixed_cost(self) -> int:
        """Cost against the bound without finished rollouts and tokens of growing ones."""
        return len(self.tokens) + TEXT_COST * (1 + len(self.growing))

    @property
    def finished_cost(self) -> int:
        """Cost of its finished rollouts against the bound."""
        return sum(rollout.cost for rollout in self.rollouts.values())
