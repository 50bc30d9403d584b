"""Compare responses token by token with the responses of plain decoding. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from paceline import SampleKey

Responses: TypeAlias = "Mapping[SampleKey, Sequence[int]]"


@dataclass(slots=True)
class Comparison:
    """Counts over any number of steps."""

    compared: int = 0
    """Tokens that had the same prefix in both responses."""
    differing: int = 0
    """Samples that differ. What follows the first difference has another prefix and does not count."""

    def add(self, what: str, truth: Responses, found: Responses) -> None:
        """Compare samples. ValueError, which names `what`, if both sides do not have the same samples."""
        if truth.keys() != found.keys():
            raise ValueError(f"{what}: the samples are not the same")
        for key, expected in truth.items():
            place = first_difference(expected, found[key])
            self.compared += len(expected) if place is None else place + 1
            self.differing += place is not None

    @property
    def differing_share(self) -> float:
        """Return the number of first differences divided by the compared tokens."""
        return self.differing / self.compared if self.compared else 0.0


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the first position at which two responses differ; None if they are equal."""
    for place, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return place
    return None if len(one) == len(other) else min(len(one), len(other))
