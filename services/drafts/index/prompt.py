"""What the index knows of one prompt."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from services.drafts.index.layout import HISTORY, NOWHERE
from services.drafts.index.names import Name

TEXT_COST = 16
"""What a prompt or a rollout counts against the bound besides its tokens, so that empty ones are bounded, too."""


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """A text that no longer grows."""

    version: int
    tokens: NDArray[np.int32]

    @property
    def cost(self) -> int:
        """What it counts against the bound."""
        return len(self.tokens) + TEXT_COST


@dataclass(frozen=True, slots=True)
class Growing:
    """A rollout that grows: of which prompt, what it is called, its version."""

    prompt: Name
    rollout: Name
    version: int


@dataclass(slots=True, eq=False)
class Prompt:
    """A prompt's texts and its automaton.

    `root` is NOWHERE while the automaton has to be rebuilt; `end` is the state where the prompt ends. Rollouts of
    version `base` weigh 1. `hashes` [HISTORY] and `hashed` are those behind the prompt. `growing` holds handles.
    """

    base: int = 0
    tokens: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    rollouts: dict[Name, Rollout] = field(default_factory=dict)
    growing: dict[Name, int] = field(default_factory=dict)
    root: int = NOWHERE
    end: int = NOWHERE
    hashes: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(HISTORY, np.uint64))
    hashed: int = 0

    @property
    def built(self) -> bool:
        """The automaton is there."""
        return self.root != NOWHERE

    @property
    def empty(self) -> bool:
        """Nothing is known of it."""
        return not (self.growing or self.rollouts or len(self.tokens))

    @property
    def fixed_cost(self) -> int:
        """What it counts against the bound without its finished rollouts and what has grown."""
        return len(self.tokens) + TEXT_COST * (1 + len(self.growing))

    @property
    def finished_cost(self) -> int:
        """What its finished rollouts count against the bound."""
        return sum(rollout.cost for rollout in self.rollouts.values())
