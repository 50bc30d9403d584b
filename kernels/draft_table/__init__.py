"""Table of guessed tokens on the device, from which the drafts of a step are read."""

from kernels.draft_table.table import DraftTable, Segments

__all__ = ["DraftTable", "Segments"]
