"""What a drafter with a model of its own is, inside a worker.

It shares the engine with the target, is called between two steps only, and says for which weights of the target it
can draft: asked for others, it refuses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from services.generation.engine.types import Ask, Drafted


class StaleDrafter(RuntimeError):
    """A drafter was asked to draft for weights that it was not made for."""


class UnsupportedDrafter(ValueError):
    """The target cannot have this drafter; the text says why."""


class FixedDrafter(RuntimeError):
    """A drafter was given weights that makes its own from the target's."""


class ModelDrafter(Protocol):
    """A drafter with weights. Versions number the target's weights; the worker's caller counts them."""

    @property
    def nbytes(self) -> int:
        """Memory of its weights beside the target's, in bytes."""

    def forget(self) -> None:
        """The target's weights are about to change."""

    def drop(self) -> None:
        """What it can make anew does not outlast the engine's sleep."""

    def begin(self, version: int) -> None:
        """The target's weights have changed to these, or are back."""

    def build(self, seconds: float) -> bool:
        """Go on getting ready for them for about so long, at least a slice; whether it is."""

    def propose(self, version: int, asks: Sequence[Ask]) -> Drafted:
        """Draft tokens, by sample; none for a sample that has no place for them.

        Raises:
            StaleDrafter: it is not ready for these weights.
        """

    def swap(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Draft with these weights from now on. They were checked: a load that fails half-way is the end of it.

        Raises:
            FixedDrafter: it has none that could be given.
        """
