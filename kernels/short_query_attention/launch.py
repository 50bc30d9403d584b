"""Size a launch, and the memory between its two kernels. Plain arithmetic: no Triton.

The number of programs follows from the device and from shapes, never from a tensor's values, so that a captured
CUDA graph works for contexts of any length. The work is a queue of units: `chunk` positions of one request, one
key-value head and one tile of its rows. Each program takes an equal share of the queue, wherever that begins and
ends, so one long context among short ones is walked by as many programs as it is worth. The kernels work out the
shares themselves, from the lengths on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.tuning import Tuning, multiprocessors

LEAST_TILE = 16


def tile_rows(longest_query: int, group: int, largest: int) -> int:
    """Rows of a tile: a power of two that holds a request's rows, as far as a program can have so many."""
    rows = max(1, longest_query * group)
    return min(max(largest, LEAST_TILE), max(LEAST_TILE, 1 << (rows - 1).bit_length()))


def programs_for(device: torch.device, chosen: Tuning) -> int:
    """Return how many programs share the queue: all that run at the same time."""
    return chosen.attention_programs * multiprocessors(device)


@dataclass(frozen=True, slots=True)
class Scratch:
    """Partial results of the programs of a launch, float32: `parts` [R, D], `peaks` and `sums` [R].

    A program leaves at most two: of the end of what another one began, and of the beginning of what it does not
    end. A row is a row of its tile in one of them. One serves any number of launches, one after the other on one
    stream.
    """

    parts: torch.Tensor
    peaks: torch.Tensor
    sums: torch.Tensor

    @staticmethod
    def of(rows: int, size: int, device: torch.device) -> Scratch:
        """Room for `rows` rows of heads of `size`."""
        parts = torch.empty(rows, size, dtype=torch.float32, device=device)
        peaks, sums = torch.empty(2, rows, dtype=torch.float32, device=device)
        return Scratch(parts, peaks, sums)

    @staticmethod
    def rows_for(longest_query: int, group: int, device: torch.device, chosen: Tuning) -> int:
        """Rows that any step with query lengths up to `longest_query` needs, however many requests it has."""
        return 2 * programs_for(device, chosen) * tile_rows(longest_query, group, chosen.attention_tile)

    @property
    def rows(self) -> int:
        """Rows that there is room for."""
        return len(self.peaks)
