"""Inputs of the attention of a step: their limits, masks of draft trees, and sizes of a launch. No Triton.

The number of programs of a launch follows from the device and from shapes, never from a tensor's values, so that a
captured CUDA graph works for contexts of any length. The work is a queue of units: `chunk` positions of one
request, one key-value head and one tile of its rows. Each program takes an equal share of the queue, wherever that
begins and ends, so one long context among short ones is read by as many programs as it needs. The kernels compute
the shares themselves, from the lengths on the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kernels.backend import FLOATS, check, check_contiguous, check_device
from kernels.tuning import Tuning, multiprocessors

LONGEST_QUERY = 128
LONGEST_TREE = 64
HEAD_SIZES = range(16, 257, 8)
LEAST_TILE = 16


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """N requests with T query tokens in all; the keys and values of these tokens are in the caches already.

    query         [T, Hq, D] float32, bfloat16 or float16; D a multiple of 8 from 16 to 256
    keys, values  [num_blocks, block, Hkv, D], query's dtype, any strides but for a contiguous last axis: other
                  layouts of a cache are passed as permuted views. Hq is a multiple of Hkv
    block_table   [N, M] int32 or int64: entry j of a request is the block of its positions j * block and on.
                  Entries that no visible position needs may hold anything
    lengths       [N] int32 or int64: positions of a request, its query tokens included
    cu_queries    [N + 1] int32 or int64: request n has the query tokens cu_queries[n] : cu_queries[n + 1], none to
                  128, which are its last positions
    longest_query, longest   upper bounds of a request's query tokens and of `lengths`: they shape the launch
    scale         of the scores; usually D ** -0.5
    window        a query sees itself and the window - 1 positions before it; None: all
    tree          [T] int64, bit j set if the query token sees the j-th query token of its request (itself included,
                  at most 64 of them): an ancestor mask. All positions before the query tokens are visible. None:
                  a query token sees those before it. Not together with a window
    """

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    block_table: torch.Tensor
    lengths: torch.Tensor
    cu_queries: torch.Tensor
    longest_query: int
    longest: int
    scale: float
    window: int | None = None
    tree: torch.Tensor | None = None

    @property
    def group(self) -> int:
        """Query heads that share a key-value head."""
        return self.query.shape[1] // self.keys.shape[2]

    def check(self) -> None:
        """Raise ValueError naming the wrong field. Values on a device are not checked: that would wait for it."""
        integers = (torch.int32, torch.int64)
        check("query", self.query, (None, None, None), FLOATS)
        tokens, heads, size = self.query.shape
        check("keys", self.keys, (None, None, None, size), (self.query.dtype,))
        check("values", self.values, tuple(self.keys.shape), (self.query.dtype,))
        requests = len(self.cu_queries) - 1
        check("cu_queries", self.cu_queries, (None,), integers)
        if requests < 0:
            raise ValueError("cu_queries must have at least one entry")
        check("lengths", self.lengths, (requests,), integers)
        check("block_table", self.block_table, (requests, None), integers)
        if size not in HEAD_SIZES:
            raise ValueError(f"the head size must be a multiple of 8 from 16 to 256, got {size}")
        if self.keys.shape[2] < 1 or heads < 1 or heads % self.keys.shape[2]:
            raise ValueError(
                f"{heads} query heads must be a multiple of {self.keys.shape[2]} key-value heads"
            )
        self._check_limits(tokens)
        check_contiguous(query=self.query, keys=self.keys, values=self.values, block_table=self.block_table)
        check_device(
            self.query.device,
            keys=self.keys, values=self.values, block_table=self.block_table, lengths=self.lengths,
            cu_queries=self.cu_queries, tree=self.tree,
        )  # fmt: skip
        if self.query.device.type == "cpu":
            self._check_values(tokens)

    def _check_limits(self, tokens: int) -> None:
        if not 0 <= self.longest_query <= LONGEST_QUERY:
            raise ValueError(f"longest_query must be in 0..{LONGEST_QUERY}, got {self.longest_query}")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window must be at least 1 or None, got {self.window}")
        if self.tree is not None:
            check("tree", self.tree, (tokens,), (torch.int64,))
            if self.window is not None:
                raise ValueError("a tree and a window exclude each other")
            if self.longest_query > LONGEST_TREE:
                raise ValueError(
                    f"longest_query must be at most {LONGEST_TREE} with a tree, got {self.longest_query}"
                )
        capacity = self.block_table.shape[1] * self.keys.shape[1]
        if not 0 <= self.longest <= capacity:
            raise ValueError(
                f"longest must be in 0..{capacity}, what the block table holds, got {self.longest}"
            )

    def _check_values(self, tokens: int) -> None:
        queries = self.cu_queries.diff()
        if self.cu_queries[0] != 0 or self.cu_queries[-1] != tokens or (queries < 0).any():
            raise ValueError(f"cu_queries must rise from 0 to the {tokens} query tokens")
        if len(queries) and queries.max() > self.longest_query:
            raise ValueError(f"longest_query is {self.longest_query}, but a request has {int(queries.max())}")
        if len(queries) and self.lengths.max() > self.longest:
            raise ValueError(
                f"longest is {self.longest}, but a request has {int(self.lengths.max())} positions"
            )
        if (queries > self.lengths).any():
            raise ValueError("lengths must count a request's query tokens too")


def ancestor_mask(
    queries: npt.NDArray[np.int64], trees: Mapping[int, Sequence[int]]
) -> npt.NDArray[np.int64]:
    """Return which query tokens of its request each query token sees, as bits, request by request.

    The query tokens of a request with a tree are the root (the sample's last token) and the tokens of its draft, in
    the order of their list. A token's parent is an index in that list, -1 for the root. Bit j stands for the j-th
    query token; a token sees itself, its ancestors and the root.

    Args:
        queries: query tokens of each request, [n]; at most LONGEST_TREE each, or ValueError.
        trees: by its index, the parents of the drafts of each request with branches; the others' are chains.
    """
    if (queries > LONGEST_TREE).any():
        raise ValueError(
            f"queries: {int(queries.max())} query tokens do not fit a mask of {LONGEST_TREE} bits"
        )
    starts = np.concatenate(([0], np.cumsum(queries)))
    offsets = np.arange(starts[-1]) - np.repeat(starts[:-1], queries)
    # The 65th bit is cut off, and so is the carry to it.
    bits = np.left_shift(np.uint64(2), offsets.astype(np.uint64)) - np.uint64(1)
    for request, parents in trees.items():
        own = [1]
        for place, parent in enumerate(parents, 1):
            # The root is -1, so its bits are the first ones.
            own.append(own[parent + 1] | 1 << place)
        bits[starts[request] : starts[request + 1]] = own
    return bits.view(np.int64)


def tile_rows(longest_query: int, group: int, largest: int) -> int:
    """Return the rows of a tile: a power of two that holds a request's rows, at most `largest`."""
    rows = max(1, longest_query * group)
    return min(max(largest, LEAST_TILE), max(LEAST_TILE, 1 << (rows - 1).bit_length()))


def programs_for(device: torch.device, chosen: Tuning) -> int:
    """Return the number of programs that share the queue: all that run at the same time."""
    return chosen.attention_programs * multiprocessors(device)


@dataclass(frozen=True, slots=True)
class Scratch:
    """Partial results of the programs of a launch, float32: `parts` [R, D], `peaks` and `sums` [R].

    A program writes at most two parts: of work that another program began, and of work that another one ends. A row
    is a row of its tile in one of them. A Scratch serves any number of launches, one after the other on one stream.
    """

    parts: torch.Tensor
    peaks: torch.Tensor
    sums: torch.Tensor

    @staticmethod
    def of(rows: int, size: int, device: torch.device) -> Scratch:
        """Return room for `rows` rows of heads of `size`."""
        parts = torch.empty(rows, size, dtype=torch.float32, device=device)
        peaks, sums = torch.empty(2, rows, dtype=torch.float32, device=device)
        return Scratch(parts, peaks, sums)

    @staticmethod
    def rows_for(longest_query: int, group: int, device: torch.device, chosen: Tuning) -> int:
        """Return enough rows for any step with query lengths up to `longest_query`, whatever its requests."""
        return 2 * programs_for(device, chosen) * tile_rows(longest_query, group, chosen.attention_tile)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.peaks)
