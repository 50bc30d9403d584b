"""Offers for tests: written one by one, handed over as drafters do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from services.generation.drafting.drafter import Offer, Offers


def batched(made: Mapping[str, Sequence[Offer | None]]) -> dict[str, Offers]:
    """Of each drafter, one offer or None per sample."""
    return {name: Offers.of(offers) for name, offers in made.items()}


def unbatched(offers: Offers | None, samples: int) -> list[Offer | None]:
    """One offer or None per sample."""
    return [None] * samples if offers is None else [offers[i] for i in range(len(offers))]
