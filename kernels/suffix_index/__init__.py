"""Suffix index over all known rollouts of a prompt."""

from kernels.suffix_index.records import Continuations, Name
from kernels.suffix_index.suffix_index import SuffixIndex, warm_up

__all__ = ["Continuations", "Name", "SuffixIndex", "warm_up"]
