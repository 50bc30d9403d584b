"""Places of rollouts in a training run: their steps, and the prompts that come next."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cadence:
    """Micro-batches between two rollouts, and between two updates of the weights."""

    rollout_every: int
    update_every: int

    def step(self, global_step: int, nth: int) -> int:
        """Return the index of a rollout: the nth one, from 0, after `global_step` updates.

        It depends on nothing else, so that a trainer that goes on from a checkpoint has the steps that it would
        have had.
        """
        return -(-global_step * self.update_every // self.rollout_every) + nth

    def updates_before(self, step: int) -> int:
        """Return how many updates come before a rollout."""
        return step * self.rollout_every // self.update_every


class Lookahead:
    """The batch after the present one, read from a repetition of the data loader's order."""

    def __init__(self, batches: Iterator[Sequence[int]], window: int) -> None:
        """`batches` are indices of the data set, [prompts] each; of these `window` are searched for a batch."""
        self._batches = batches
        self._window = window
        self._next: Sequence[int] | None = next(batches, None)

    def after(self, is_present: Callable[[Sequence[int]], bool]) -> Sequence[int] | None:
        """Return the batch after the present one, or None once that is not found, and from then on."""
        for _ in range(self._window):
            if self._next is None:
                break
            present, self._next = self._next, next(self._batches, None)
            if is_present(present):
                return self._next
        self._next = None
        return None
