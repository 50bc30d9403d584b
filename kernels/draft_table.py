"""Guessed tokens of samples by position, in rows that are assigned to samples.

    table = DraftTable(slots=256, length=32_768, device=device)
    table.write(Segments.of([(slot, start, tokens)]))
    drafts = table.gather(slots, behind, longest)

Nothing here waits for the device, and what runs on it can be captured in a CUDA graph. Plain torch: these are a few
small launches a step, and a special kernel would not be faster.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.transfer import uploaded


@dataclass(frozen=True, slots=True)
class Segments:
    """Guesses to write, one for each of n rows at most: row, first position and count [n] int64, and their tokens.

    `tokens` [T] int32 holds the tokens of all segments, one after the other.
    """

    slots: torch.Tensor
    starts: torch.Tensor
    counts: torch.Tensor
    tokens: torch.Tensor

    @classmethod
    def of(cls, segments: Iterable[tuple[int, int, Sequence[int]]]) -> Segments:
        """Return segments (row, first position, tokens) in host memory. A row's guess ends with its segment."""
        found = list(segments)
        tokens = [np.asarray(each, np.int32) for _, _, each in found]
        return cls(
            torch.tensor([slot for slot, _, _ in found], dtype=torch.int64),
            torch.tensor([start for _, start, _ in found], dtype=torch.int64),
            torch.tensor([len(each) for each in tokens], dtype=torch.int64),
            torch.from_numpy(np.concatenate([np.empty(0, np.int32), *tokens])),
        )

    def on(self, device: torch.device) -> Segments:
        """Return the same on a device, by one copy, without waiting for it."""
        return Segments(**uploaded(self.vectors(), device))

    def vectors(self) -> Mapping[str, torch.Tensor]:
        """Return the vectors by name."""
        return {"slots": self.slots, "starts": self.starts, "counts": self.counts, "tokens": self.tokens}


class DraftTable:
    """Tokens of [slots, length] positions int32, and where the guess of each row ends."""

    def __init__(self, slots: int, length: int, device: torch.device) -> None:
        """Make a table without guesses."""
        self.tokens = torch.zeros(slots, length, dtype=torch.int32, device=device)
        self.end = torch.zeros(slots, dtype=torch.int64, device=device)

    def write(self, segments: Segments) -> None:
        """Write segments, on the device or in host memory: within the rows, and at most one for each row."""
        there = segments.on(self.tokens.device)
        total = len(there.tokens)
        rows = torch.repeat_interleave(there.slots, there.counts, output_size=total)
        # Position of a token: its index among all tokens - the index of its segment's first token + the start.
        shift = there.starts + there.counts - there.counts.cumsum(0)
        shifts = torch.repeat_interleave(shift, there.counts, output_size=total)
        at = torch.arange(total, device=rows.device) + shifts
        self.tokens.index_put_((rows, at), there.tokens)
        self.end.index_put_((there.slots,), there.starts + there.counts)

    def gather(self, slots: torch.Tensor, behind: torch.Tensor, longest: int) -> torch.Tensor:
        """Return the next guesses of some rows, [n, longest] int64, on the device.

        Args:
            slots: [n] int64, rows.
            behind: [n] integers, the first positions to guess.
            longest: number of guesses of a row. Missing guesses are token 0, which is a draft like any other.
        """
        at = behind.long().unsqueeze(1) + torch.arange(longest, device=slots.device)
        found = self.tokens[slots.unsqueeze(1), at.clamp(max=self.tokens.shape[1] - 1)].long()
        return torch.where(at < self.end[slots].unsqueeze(1), found, 0)
