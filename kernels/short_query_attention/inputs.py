"""Inputs of the attention of a step, and their limits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.checks import FLOATS, check, check_contiguous, check_device

LONGEST_QUERY = 128
LONGEST_TREE = 64
HEAD_SIZES = range(16, 257, 8)


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
        """ValueError naming what does not fit. Values are looked at where that costs no wait: in host memory."""
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
