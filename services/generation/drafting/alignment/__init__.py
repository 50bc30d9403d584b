"""Samples that follow sequences of tokens: where each is along its own, and what comes next there."""

from services.generation.drafting.alignment.alignments import Alignments, Followed, warm_up

__all__ = ["Alignments", "Followed", "warm_up"]
