"""Compare responses token by token with the responses of plain decoding. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from paceline import SampleKey

Responses: TypeAlias = "Mapping[SampleKey, Sequence[int]]"


@dataclass(frozen=True, slots=True)
class Difference:
    """First position at which two responses differ. Later positions have different prefixes and do not count."""

    system: str
    step: int
    key: SampleKey
    position: int
    expected: int | None
    """Token of plain decoding; None if its response had ended."""
    found: int | None


@dataclass(slots=True)
class Comparison:
    """Differences over any number of steps."""

    compared: int = 0
    """Tokens that had the same prefix in both responses."""
    samples: int = 0
    differences: list[Difference] = field(default_factory=list)

    def add(self, system: str, step: int, truth: Responses, found: Responses) -> None:
        """Compare the samples of a system's step. Both sides must have the same samples."""
        if truth.keys() != found.keys():
            raise ValueError(f"{system}, step {step}: the samples are not the same")
        for key, expected in truth.items():
            self.samples += 1
            place = first_difference(expected, found[key])
            self.compared += len(expected) if place is None else place + 1
            if place is not None:
                here, there = _at(expected, place), _at(found[key], place)
                self.differences.append(Difference(system, step, key, place, here, there))

    @property
    def differing_share(self) -> float:
        """Return the number of first differences divided by the compared tokens."""
        return len(self.differences) / self.compared if self.compared else 0.0


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the first position at which two responses differ; None if they are equal."""
    for place, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return place
    return None if len(one) == len(other) else min(len(one), len(other))


def _at(tokens: Sequence[int], place: int) -> int | None:
    return tokens[place] if place < len(tokens) else None
