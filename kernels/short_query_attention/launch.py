"""Divide a step into programs, and size the memory between its two kernels. Plain arithmetic: no Triton.

The number of programs follows from shapes and upper bounds only, never from a tensor's values, so that a captured
CUDA graph works for contexts of any length. The kernels compute the length of the pieces themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

PROGRAMS_WANTED = 264
"""Two for each multiprocessor of a large GPU: contexts are cut into pieces until there are as many."""
MOST_PIECES = 64
LEAST_TILE = 16
LARGEST_TILE = 128
LEAST_PIECE = 256
"""Positions; shorter pieces cost more in their sum than they gain."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Programs of a launch: requests x key-value heads x (tiles x pieces); a tile has `tile` rows."""

    tile: int
    tiles: int
    pieces: int


def tile_rows(longest_query: int, group: int) -> int:
    """Rows of a tile: a power of two that holds a request's rows, as far as a program can have so many."""
    rows = max(1, longest_query * group)
    return min(LARGEST_TILE, max(LEAST_TILE, 1 << (rows - 1).bit_length()))


def cut(
    requests: int,
    kv_heads: int,
    longest_query: int,
    group: int,
    reach: int,
    wanted: int = PROGRAMS_WANTED,
    least: int = LEAST_PIECE,
) -> Cut:
    """Return the cut of a step whose requests see at most `reach` positions, for about `wanted` programs.

    A context has no more pieces than it has times `least` positions, and MOST_PIECES at most.
    """
    tile = tile_rows(longest_query, group)
    tiles = max(1, -(-longest_query * group // tile))
    pieces = min(MOST_PIECES, wanted // max(1, requests * kv_heads * tiles), reach // max(1, least))
    return Cut(tile, tiles, max(1, pieces))


@dataclass(frozen=True, slots=True)
class Scratch:
    """Partial results of the pieces of a step, float32: `parts` [R, D], `peaks` and `sums` [R].

    A row is a piece with a query token and a head. One serves any number of launches, one after the other on one
    stream; a launch that does not fit into it cuts contexts into fewer pieces.
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
    def rows_for(longest_query: int, group: int, wanted: int = PROGRAMS_WANTED) -> int:
        """Rows that any step with query lengths up to `longest_query` needs, however many requests it has.

        Pieces are only made until there are `wanted` programs, and a program fills the rows of its tile at most.
        """
        return wanted * tile_rows(longest_query, group)

    @property
    def rows(self) -> int:
        """Rows that there is room for."""
        return len(self.peaks)
