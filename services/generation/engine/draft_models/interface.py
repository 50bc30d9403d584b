"""Interface of a draft model inside a worker.

It shares the engine with the target, is called between two steps only, and says for which weights of the target it
can draft: asked for others, it refuses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from services.generation.engine.types import Ask, Drafted


class StaleDrafter(RuntimeError):
    """A draft model was queried for weights that it is not ready for."""


class UnsupportedDrafter(ValueError):
    """The target cannot have this draft model; the message says why."""


class FixedDrafter(RuntimeError):
    """Weights were given to a draft model that derives its own from the target's."""


class ModelDrafter(Protocol):
    """Draft model in a worker. Versions number the target's weights, as the caller counts them."""

    @property
    def nbytes(self) -> int:
        """Memory of its weights beside the target's, in bytes."""

    def forget(self) -> None:
        """Discard what depends on the target's weights, which are about to change."""

    def drop(self) -> None:
        """Free what can be rebuilt, before the engine sleeps."""

    def begin(self, version: int) -> None:
        """Prepare for this version of the target's weights, which are loaded now."""

    def build(self, seconds: float) -> bool:
        """Prepare for about `seconds`, at least one slice of work; returns whether it is ready."""

    def propose(self, version: int, asks: Sequence[Ask]) -> Drafted:
        """Draft tokens by sample; none for a sample without free KV slots.

        Raises:
            StaleDrafter: it is not ready for these weights.
        """

    def swap(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace the weights by checked ones. A load that fails leaves the draft model unusable.

        Raises:
            FixedDrafter: it has none that could be given.
        """
