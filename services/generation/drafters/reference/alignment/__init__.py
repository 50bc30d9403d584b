"""Alignment of samples to their references: the place of each along its own, and the tokens that follow there."""

from services.generation.drafters.reference.alignment.alignments import AlignedSamples, Alignments, warm_up

__all__ = ["AlignedSamples", "Alignments", "warm_up"]
