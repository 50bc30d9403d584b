"""What a drafter with a model of its own is, inside a worker.

One of them at a time shares the engine with the target. It is called between two steps only, and says for which
weights of the target it was made: asked for others, it refuses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from services.generation.engine.draft_rows import Ask
from services.generation.engine.types import Proposal


class StaleDrafter(RuntimeError):
    """A drafter was asked to draft for weights that it was not made for."""


class ModelDrafter(Protocol):
    """A drafter with weights. Versions number the target's weights; the worker's caller counts them."""

    @property
    def nbytes(self) -> int:
        """Memory that it has beside the target's, in bytes."""

    @property
    def version(self) -> int | None:
        """The target's weights that it is made for; None while it is being made, or is not."""

    def forget(self) -> None:
        """The target's weights are about to change."""

    def drop(self) -> None:
        """Give its memory back, until it is made anew."""

    def begin(self, version: int) -> None:
        """The target's weights have changed to these."""

    def build(self, seconds: float) -> bool:
        """Go on making it for about so long, at least a slice; whether it is ready."""

    def propose(self, version: int, asks: Sequence[Ask]) -> dict[str, Proposal]:
        """Draft tokens, by sample; none for a sample that has no place for them.

        Raises:
            StaleDrafter: it is not made for these weights.
        """
